"""How many images pass the network at once, by the free memory of a GPU."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ..models import EmbeddingModel

# Of the free memory, what saved activations may fill: the rest is for the gradients of a layer, the
# loss and the allocator.
SHARE = 0.7
# Bytes of a trained parameter that come with the first step: its gradient, AdamW's two moments.
OF_TRAINED = 12


def micro_batch(
    model: EmbeddingModel, loss: nn.Module, *, count: int, size: int, precision: str, free: int
) -> int:
    """The images of `count` that pass the network at once in `free` bytes; 0: all of them.

    Two forward passes of a few images of `size` pixels tell what autograd saves of each.  Raises
    ValueError where not even one image fits.
    """
    parameters = [*model.parameters(), *loss.parameters()]
    trained = sum(one.numel() for one in parameters if one.requires_grad)
    left = SHARE * free - OF_TRAINED * trained
    of_image = saved_by_an_image(model, size, precision)
    if count * of_image <= left:
        return 0
    fitting = int(left // of_image)
    if fitting < 1:
        raise ValueError(
            f"an image of {size} px needs {of_image / 1e9:.2f} GB, and {free / 1e9:.1f} GB of the "
            "GPU are free: end what else runs on it, or choose recompute = true, a smaller "
            "image_size or backbone"
        )
    return fitting


def saved_by_an_image(model: EmbeddingModel, size: int, precision: str) -> int:
    """Bytes that autograd saves for the backward pass of one more image of `size` pixels.

    The model ends in training mode; in the other one, its batch normalisation learns nothing here.
    """
    model.eval()
    few, more = (_saved(model, count, size, precision) for count in (1, 2))
    model.train()
    return more - few


def _saved(model: EmbeddingModel, count: int, size: int, precision: str) -> int:
    """Bytes that autograd saves for the backward pass of `count` images, without weights."""
    device = next(model.parameters()).device
    images = torch.zeros(count, 3, size, size, device=device)
    in_bfloat16 = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")
    with in_bfloat16:
        return saved_by_autograd(lambda: model(images), model.state_dict().values())


def saved_by_autograd(call: Callable[[], object], weights: Iterable[Tensor]) -> int:
    """Bytes that autograd saves in `call` for the backward pass, without those of `weights`."""
    of_weights = {one.untyped_storage().data_ptr() for one in weights}
    kept = {}

    def remember(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        # The graph lives as long as what is returned: no storage is counted twice, or not at all.
        returned = call()
    del returned
    return sum(kept.values())
