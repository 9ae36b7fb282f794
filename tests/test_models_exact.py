"""Other families of backbones, the files of others, what is refused, and the models' other forms."""

from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer

from pumalib import config, models
from pumalib.models import backbones
from pumalib.models.embedding import EmbeddingModel

DEIT = Path(__file__).resolve().parents[2] / "shared" / "weights" / "deit_tiny_patch16_224.safetensors"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def tiny(method):
    """A method on a ViT of two layers, with every part made random so that it matters."""
    vit = VisionTransformer(img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=0)
    model = EmbeddingModel(vit, config.method(method), 8)
    for name, parameter in model.named_parameters():
        if ".up." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def gradients(model, images, gates):
    """Embeddings of a pass and the gradient of every trainable parameter."""
    model.zero_grad()
    embeddings = model(images, gates)
    target = torch.linspace(-1, 1, embeddings.numel()).view_as(embeddings)
    (embeddings * target).sum().backward()
    return embeddings.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def same(backbone, reference):
    return backbones.state_digest(backbone) == backbones.state_digest(reference)


# ---- other families ----------------------------------------------------------------------------------------------

FAMILIES = {
    "deit_tiny_distilled_patch16_224": 32,
    "vit_small_patch14_reg4_dinov2": 28,
    "vit_xsmall_patch16_clip_224": 32,
}


@pytest.mark.parametrize("name, size", FAMILIES.items())
def test_puma_without_open_adapters_and_prompts_is_the_frozen_backbone(name, size):
    model = models.build("puma", name, 16, pretrained=False, image_size=size, adapter_keep=0.0, prompts=0)
    model.adapters.requires_grad_(False).apply(lambda m: hasattr(m, "weight") and m.weight.normal_())
    images = torch.randn(2, 3, size, size)
    expected = F.normalize(model.head(model.backbone.eval()(images)), dim=-1)
    for mode in (True, False):
        torch.testing.assert_close(model.train(mode)(images), expected)


@pytest.mark.parametrize("name", ["vit_small_patch16_224.augreg_in21k", "deit_small_distilled_patch16_224.fb_in1k"])
def test_backbones_named_with_their_tags_are_timms(name):
    with torch.device("meta"):
        model = models.build("puma", name, pretrained=False)
    assert model.reads_class_token
    assert backbones.normalisation(model.backbone)[0] == timm.get_pretrained_cfg(name).mean
    assert backbones.weights_digest(name, "hub") == f"hub:timm/{name}:{name}"


def test_pooling_over_patches_leaves_prompts_out():
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=32, global_pool="avg", class_token=True)
    model = EmbeddingModel(vit, config.method("puma"), 16).eval()
    seen = []
    vit.fc_norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    vit.norm.register_forward_hook(lambda module, args, output: seen.append(output))
    model(torch.randn(2, 3, 32, 32))
    tokens, pooled = seen
    assert tokens.shape == (2, 1 + 8 + 4, 192)
    torch.testing.assert_close(pooled, tokens[:, 9:].mean(1))


@pytest.mark.parametrize("method", ["full", "linear", "mlp3"])
def test_resnet_pools_average_and_maximum(method):
    model = models.build(method, "resnet18", 16, pretrained=False).eval()
    images = torch.randn(2, 3, 64, 64)
    features = model.backbone.forward_features(images)
    pooled = (features.mean((2, 3)) + features.amax((2, 3))) / 2
    torch.testing.assert_close(model(images), F.normalize(model.head(pooled), dim=-1))


# ---- files of weights ---------------------------------------------------------------------------------------------


def test_checkpoints_of_deit_and_of_data_parallel_training(tmp_path):
    reference = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=0)
    state = {**reference.state_dict(), "head.weight": torch.ones(5, 192), "head_dist.weight": torch.ones(5, 192)}
    torch.save({"model": state}, tmp_path / "deit.pth")
    assert same(backbones.create("deit_tiny_distilled_patch16_224", tmp_path / "deit.pth"), reference)
    torch.save({"state_dict": {f"module.{key}": value for key, value in state.items()}}, tmp_path / "ddp.pth")
    assert same(backbones.create("deit_tiny_distilled_patch16_224", tmp_path / "ddp.pth"), reference)
    torch.save({"student": state, "teacher": state}, tmp_path / "dino.pth")
    with pytest.raises(ValueError, match="it holds student, teacher; save the part of it that is the network"):
        backbones.create("deit_tiny_distilled_patch16_224", tmp_path / "dino.pth")


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path):
    file = tmp_path / "small.safetensors"
    state = backbones.mini_vit().state_dict()

    def refused(message, error=ValueError, pretrained=file):
        with pytest.raises(error, match=message):
            backbones.create("mini_vit", pretrained)

    safetensors.torch.save_file({**state, "norm.weight": torch.ones(3)}, file)
    refused(r"small.safetensors does not fit backbone 'mini_vit'.*size mismatch for norm.weight.*\[3\].*\[128\]")
    safetensors.torch.save_file({**state, "extra": torch.ones(3)}, file)
    refused("small.safetensors does not fit backbone 'mini_vit'.*Unexpected.*extra")
    del state["norm.weight"]
    safetensors.torch.save_file(state, file)
    refused("small.safetensors does not fit backbone 'mini_vit'.*Missing.*norm.weight")
    file.write_bytes(file.read_bytes()[:-100])
    refused("small.safetensors cannot be read as weights")
    refused("no weights at .*nothing.pth", FileNotFoundError, "nothing.pth")
    refused("does not fit backbone 'mini_vit'", pretrained=backbones.embedded_weights("mini_vit_64"))


@pytest.mark.skipif(not DEIT.is_file(), reason="../shared/weights is not here")
def test_real_weights_from_a_local_file():
    name = "deit_tiny_patch16_224"
    backbone = backbones.create(name, DEIT)
    stored = safetensors.torch.load_file(DEIT)
    assert torch.equal(backbone.blocks[0].attn.qkv.weight, stored["blocks.0.attn.qkv.weight"])
    assert backbones.normalisation(backbone)[0] == (0.485, 0.456, 0.406)
    assert backbones.create(name, DEIT, image_size=96).pos_embed.shape == (1, 37, 192)  # resampled
    with pytest.raises(ValueError, match="does not fit backbone 'vit_small_patch16_224'"):
        backbones.create("vit_small_patch16_224", DEIT)


REFUSED = {
    "unknown backbone 'vit_smal_patch16_224'; near: vit_small_patch16_224": ("linear", "vit_smal_patch16_224"),
    "unknown backbone '.*dinos'; near: vit_small_patch16_224.dino": ("linear", "vit_small_patch16_224.dinos"),
    "unknown backbone 'mini_vit_32'; near: mini_vit, mini_vit_64; known: mini_vit and": ("linear", "mini_vit_32"),
    "mini_vit_64 takes 32 px images, not image_size = 64": ("linear", "mini_vit_64", {"image_size": 64}),
    "16 px: image_size = 100 is no multiple; 96 or 112": ("linear", "vit_tiny_patch16_224", {"image_size": 100}),
    "unknown method 'adaptor'; did you mean 'adapter'": ("adaptor", "mini_vit"),
    "ResNet has none: use 'full', 'linear' or 'mlp3'": ("puma", "resnet18"),
    "'embedded' is only for mini_vit and mini_vit_64": ("linear", "vit_tiny_patch16_224", {"pretrained": "embedded"}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_unknown_names_and_impossible_methods(message):
    method, name, *options = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        models.build(method, name, **{"pretrained": False} | dict(*options))


def test_without_a_network_the_hub_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr(timm, "create_model", lambda *args, **options: 1 / 0)
    with pytest.raises(FileNotFoundError, match=r"ZeroDivisionError.*On a machine .* pretrained = <that file>"):
        models.build("linear", "vit_tiny_patch16_224.augreg_in21k")


# ---- other forms equal the equations -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["full", "puma+lora"])
def test_the_last_mlp_needs_the_class_token_alone(method):
    model = tiny(method).train()
    images, gates = torch.randn(3, 3, 16, 16), model.draw_gates(3)
    assert model.reads_class_token
    alone = gradients(model, images, gates)
    model.reads_class_token = False
    torch.testing.assert_close(alone, gradients(model, images, gates), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["full", "vpt-deep", "puma+lora-stochastic"])
def test_recomputing_layers_gives_the_same_gradients(method):
    model, computed = tiny(method).train(), []
    model.backbone.blocks[0].norm1.register_forward_hook(lambda *_: computed.append(model.recompute))
    images, gates = torch.randn(4, 3, 16, 16), model.draw_gates(4)
    expected = gradients(model, images, gates)
    model.recompute = True
    torch.testing.assert_close(gradients(model, images, gates), expected, atol=0, rtol=0)
    assert computed == [False, True, True]


# every part at least once; what is not here is a sum of these
@pytest.mark.parametrize("method", ["vpt-deep", "lora-stochastic", "puma"])
def test_every_method_compiles(method):
    torch.compiler.reset()
    model = tiny(method).train()
    images, gates = torch.randn(4, 3, 16, 16), model.draw_gates(4)
    expected = gradients(model, images, gates)
    model.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(model, images, gates), expected)


@pytest.mark.parametrize("method", ["puma", "puma+lora-stochastic", "full"])
def test_the_evaluation_graph_exports(method):
    model, images = tiny(method).eval(), torch.randn(2, 3, 16, 16)
    exported = torch.export.export(model, (images,)).module()
    torch.testing.assert_close(exported(images), model(images), atol=1e-5, rtol=0)
