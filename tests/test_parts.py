"""A new parameter-efficient method is one new file: found by name, trained, saved and loaded."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from timm.layers import SwiGLU
from timm.models.vision_transformer import VisionTransformer

from pumalib import config, models

# What the hooks can do, in one part each: features, tokens and attention; with and without gates.
SCALE_SHIFT = '''
"""Scale and shift of what each branch gives (SSF, Lian et al., NeurIPS 2022), stochastic."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from pumalib.models import parts
from pumalib.models.puma import Gate


@dataclass(frozen=True)
class Settings:
    std: float = 0.02
    keep: float = 1.0
    place: Literal["both", "mlp"] = "both"


class Part(parts.Part):
    def __init__(self, settings, shapes):
        super().__init__()
        self.place = settings.place
        self.gate = Gate(settings.keep)
        self.scale = nn.Parameter(settings.std * torch.randn(shapes.layers, 2, shapes.width))
        self.shift = nn.Parameter(torch.zeros(shapes.layers, 2, shapes.width))
        # What is neither trained nor of a backbone must be saved too.
        self.register_buffer("seen", torch.zeros(1))

    def draw_gates(self, images, generator):
        return self.gate.draw(len(self.scale), images, self.training, generator)

    def addition(self, layer, branch, h, out, gates):
        number = parts.BRANCHES.index(branch)
        if self.place not in ("both", branch):
            return None
        change = out * self.scale[layer, number] + self.shift[layer, number]
        if gates is not None:
            change = change * gates[layer, number][:, None, None].to(change.dtype)
        return change
'''

ONE_TOKEN = '''
"""One token before the first layer, and another one before the second."""

from dataclasses import dataclass

import torch
from torch import nn

from pumalib.models import parts


@dataclass(frozen=True)
class Settings:
    length: int = 3


class Part(parts.Part):
    def __init__(self, settings, shapes):
        super().__init__()
        self.first = nn.Parameter(torch.randn(settings.length, shapes.width))
        self.second = nn.Parameter(torch.randn(1, shapes.width))

    def tokens(self, patches, layer, gates):
        chosen = {0: self.first, 1: self.second}.get(layer)
        if chosen is None:
            return None
        return chosen.expand(len(patches), -1, -1), None
'''

VALUE_BIAS = '''
"""A trained bias of every value, and a frozen direction that is drawn once."""

from dataclasses import dataclass

import torch
from torch import nn

from pumalib.models import parts


@dataclass(frozen=True)
class Settings:
    pass


class Part(parts.Part):
    def __init__(self, settings, shapes):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(shapes.layers, shapes.width))
        self.direction = nn.Parameter(torch.randn(shapes.width), requires_grad=False)

    def qkv(self, layer, h, products, gates):
        q, k, v = products
        return [q, k, v + self.bias[layer] + 0.1 * self.direction]
'''

IA3 = '''
"""Factors on keys, values and the activations of the MLP ((IA)3, Liu et al., NeurIPS 2022)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pumalib.models import parts


@dataclass(frozen=True)
class Settings:
    """Of (IA)3."""

    inner: bool = True  # of the MLP's activations too


class Part(parts.Part):
    """Three vectors a layer, which begin as ones."""

    def __init__(self, settings: Settings, shapes: parts.Shapes) -> None:
        super().__init__()
        self.k = nn.Parameter(torch.ones(shapes.layers, shapes.width))
        self.v = nn.Parameter(torch.ones(shapes.layers, shapes.width))
        if settings.inner:
            self.inner = nn.Parameter(torch.ones(shapes.layers, shapes.features("act")))

    def qkv(
        self, layer: int, h: Tensor, products: list[Tensor], gates: Tensor | None
    ) -> list[Tensor]:
        """Keys and values (B, N, D), feature by feature."""
        q, k, v = products
        return [q, k * self.k[layer], v * self.v[layer]]

    def activations(self, layer: int, place: str, x: Tensor, gates: Tensor | None) -> Tensor:
        """Of the MLP, (B, N, hidden), feature by feature."""
        if place == "act" and hasattr(self, "inner"):
            return x * self.inner[layer]
        return x
'''

BITFIT = '''
"""The biases of the backbone (BitFit, Ben Zaken et al., ACL 2022), as what is added to them."""

from dataclasses import dataclass

import torch
from torch import nn

from pumalib.models import parts


@dataclass(frozen=True)
class Settings:
    pass


class Part(parts.Part):
    def __init__(self, settings, shapes):
        super().__init__()
        self.shifts = nn.ParameterDict()
        for place in parts.PLACES:
            # What has no bias.
            if place != "act":
                self.shifts[place] = nn.Parameter(
                    torch.zeros(shapes.layers_at(place), shapes.features(place))
                )

    def activations(self, layer, place, x, gates):
        if place == "act":
            return x
        return x + self.shifts[place][layer]
'''

SSF = '''
"""Scale and shift after each linear and norm layer (SSF, Lian et al., NeurIPS 2022)."""

from dataclasses import dataclass

import torch
from torch import nn

from pumalib.models import parts


@dataclass(frozen=True)
class Settings:
    std: float = 0.02


class Part(parts.Part):
    def __init__(self, settings, shapes):
        super().__init__()
        self.scale = nn.ParameterDict()
        self.shift = nn.ParameterDict()
        for place in parts.PLACES:
            if place != "act":
                shape = (shapes.layers_at(place), shapes.features(place))
                self.scale[place] = nn.Parameter(1 + settings.std * torch.randn(shape))
                self.shift[place] = nn.Parameter(settings.std * torch.randn(shape))

    def activations(self, layer, place, x, gates):
        if place == "act":
            return x
        return x * self.scale[place][layer] + self.shift[place][layer]
'''

SOURCES = {
    "scale_shift": SCALE_SHIFT,
    "one_token": ONE_TOKEN,
    "value_bias": VALUE_BIAS,
    "ia3": IA3,
    "bitfit": BITFIT,
    "ssf": SSF,
}


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """Each of the above as a file of the package, and two that are no parts."""
    folder = tmp_path / "package"
    folder.mkdir()
    for name, source in {**SOURCES, "no_part": "Settings = 1\n"}.items():
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(folder)])
    torch.manual_seed(0)
    yield
    for name in [*SOURCES, "no_part"]:
        sys.modules.pop(f"pumalib.models.{name}", None)
        vars(models).pop(name, None)


def method(part, settings=None, **more):
    """The line of `config.METHODS`."""
    return config.Method(f"with-{part}", part=part, part_settings=settings or {}, **more)


def images(count=4):
    return torch.randn(count, 3, 48, 48)


def trained(model, steps=2):
    """The model after some steps of AdamW, its losses, and the gates of the last step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    batch = images()
    target = F.normalize(torch.randn(4, model.dim), dim=-1)
    for step in range(steps):
        gates = model.draw_gates(len(batch), torch.Generator().manual_seed(step))
        loss = (model(batch, gates) - target).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, gates


STOCHASTIC = {"keep": 0.5, "place": "mlp"}
CASES = {
    "scale and shift": method("scale_shift"),
    "stochastic": method("scale_shift", STOCHASTIC),
    "tokens": method("one_token", {"length": 2}),
    "attention": method("value_bias"),
    "(IA)3": method("ia3"),
    "BitFit": method("bitfit"),
    "SSF": method("ssf"),
    "SSF beside puma and lora": method("ssf", prompts=4, adapter_rank=8, lora_rank=4),
    "beside puma and lora": method("value_bias", prompts=4, adapter_rank=8, lora_rank=4),
    "beside prompts": method("one_token", prompts=1, prompt_deep=True),
    "beside full": method("scale_shift", tune_backbone=True),
}


@pytest.mark.parametrize("case", CASES)
def test_a_new_part_is_trained_saved_and_loaded(case, tmp_path):
    run = config.Run(data=config.Data(image_size=48), method=CASES[case], dim=16)
    model = models.build(run.method, run.backbone, 16, pretrained="embedded").train()
    before = {name: p.detach().clone() for name, p in model.part.named_parameters()}
    trained(model)
    moved = [name for name, p in model.part.named_parameters() if not torch.equal(p, before[name])]
    wanted = [name for name, p in model.part.named_parameters() if p.requires_grad]
    assert moved == wanted
    for buffer in model.part.buffers():
        buffer.fill_(5)

    # Under another state of the random numbers: nothing that it draws may be missing in the file.
    torch.manual_seed(1)
    models.save(model, run, tmp_path)
    loaded, same = models.load_model(tmp_path)
    assert same == run
    batch = images()
    assert torch.equal(loaded(batch), model.eval()(batch))
    for key, value in model.part.state_dict().items():
        assert torch.equal(loaded.part.state_dict()[key], value), key


def test_a_checkpoint_holds_all_of_a_part():
    model = models.build(method("value_bias"), "mini_vit", 16, pretrained="random")
    kept = models.trainable_state(model)
    assert {"part.bias", "part.direction", "head.weight", "head.bias"} == set(kept)


def test_a_part_starts_from_its_defaults_and_takes_settings():
    base = models.build("linear", "mini_vit", 16, pretrained="embedded").eval()
    model = models.build(method("scale_shift", {"std": 0}), "mini_vit", 16, pretrained="embedded")
    model.head.load_state_dict(base.head.state_dict())
    batch = images()
    torch.testing.assert_close(model.eval()(batch), base(batch))
    default = models.build(method("scale_shift"), "mini_vit", 16, pretrained="embedded")
    assert default.part.scale.std().item() == pytest.approx(0.02, rel=0.1)
    assert models.part_settings(method("scale_shift", {"keep": 0.5})) == {
        "std": 0.02,
        "keep": 0.5,
        "place": "both",
    }
    assert models.part_settings(config.METHODS["puma"]) == {}


def test_gates_of_a_part_are_drawn_in_training_and_constant_in_evaluation():
    model = models.build(method("scale_shift", STOCHASTIC), "mini_vit", 16, pretrained="random")
    model.part.shift.data.normal_()
    batch = images()
    gates = model.train().draw_gates(4, torch.Generator().manual_seed(0))
    assert gates["part"].shape == (5, 2, 4)
    assert set(gates["part"].unique().tolist()) == {0.0, 2.0}
    closed = model(batch, {"part": torch.zeros(5, 2, 4)})
    model.part.shift.data.zero_()
    model.part.scale.data.zero_()
    assert torch.equal(model(batch, gates), closed)
    assert model.eval().draw_gates(4)["part"].eq(1).all()


def test_tokens_of_several_parts_stand_side_by_side():
    settings = {"prompts": 1, "prompt_length": 4, "prompt_deep": True, "prompt_position": "none"}
    model = models.build(
        method("one_token", {"length": 2}, **settings), "mini_vit", 16, pretrained="random"
    ).eval()
    seen = []
    for block in model.backbone.blocks:
        block.norm1.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(images(1))
    # Class token, four prompt tokens, two of the part and from the second layer on one, 36 patches.
    assert [x.shape[1] for x in seen] == [43, 42, 42, 42, 42]
    for layer in range(5):
        assert torch.equal(seen[layer][0, 1:5], model.prompt.prompts[layer])
    assert torch.equal(seen[0][0, 5:7], model.part.first)
    assert torch.equal(seen[1][0, 5], model.part.second[0])


def copied(model):
    """A backbone of the same weights, to be changed by hand, and the model's head."""
    other = models.build("linear", "mini_vit", 16, pretrained="random").eval()
    other.backbone.load_state_dict(model.backbone.state_dict())
    other.head.load_state_dict(model.head.state_dict())
    return other


def drawn(name):
    """A model with a part whose parameters are other than at their start."""
    model = models.build(method(name), "mini_vit", 16, pretrained="random").eval()
    for weight in model.part.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    return model


LINEAR_AND_NORM = {
    "norm1": lambda block: block.norm1,
    "qkv": lambda block: block.attn.qkv,
    "proj": lambda block: block.attn.proj,
    "norm2": lambda block: block.norm2,
    "fc1": lambda block: block.mlp.fc1,
    "fc2": lambda block: block.mlp.fc2,
}


def layers_of(backbone):
    """(place, layer, module) of all that has a bias."""
    yield "patch_embed", 0, backbone.patch_embed.proj
    for number, block in enumerate(backbone.blocks):
        for place, module_of in LINEAR_AND_NORM.items():
            yield place, number, module_of(block)
    yield "norm", 0, backbone.norm


@torch.no_grad()
def test_ia3_is_its_factors_in_the_weights():
    model = drawn("ia3")
    other = copied(model)
    for number, block in enumerate(other.backbone.blocks):
        ones = torch.ones(128)
        factor = torch.cat([ones, model.part.k[number], model.part.v[number]])
        block.attn.qkv.weight *= factor[:, None]
        block.attn.qkv.bias *= factor
        block.mlp.fc2.weight *= model.part.inner[number]
    batch = images()
    torch.testing.assert_close(model(batch), other(batch))
    assert not torch.allclose(model(batch), copied(model)(batch), atol=1e-3)
    assert models.count_parameters(model.part)[0] == 5 * (128 + 128 + 512)


@torch.no_grad()
def test_bitfit_is_other_biases():
    model = drawn("bitfit")
    other = copied(model)
    biases = 0
    for place, number, module in layers_of(other.backbone):
        module.bias += model.part.shifts[place][number]
        biases += module.bias.numel()
    batch = images()
    torch.testing.assert_close(model(batch), other(batch))
    assert models.count_parameters(model.part)[0] == biases


@torch.no_grad()
def test_ssf_is_folded_into_the_weights():
    """... as its authors do for inference: w' = s w, b' = s b + t."""
    model = drawn("ssf")
    other = copied(model)
    for place, number, module in layers_of(other.backbone):
        scale = model.part.scale[place][number]
        shape = [-1] + [1] * (module.weight.dim() - 1)
        module.weight *= scale.view(shape)
        module.bias.mul_(scale).add_(model.part.shift[place][number])
    batch = images()
    torch.testing.assert_close(model(batch), other(batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_activations_are_given_at_each_place_once_a_layer(recompute, monkeypatch):
    seen = []
    model = models.build(method("ia3"), "mini_vit", 16, pretrained="random")
    model.recompute = recompute

    def activations(layer, place, x, gates):
        seen.append((place, layer, tuple(x.shape)))
        return x

    monkeypatch.setattr(model.part, "activations", activations)
    model(images(2))
    first = ["norm1", "qkv", "proj", "norm2", "fc1", "act", "fc2"]
    wanted = ["patch_embed", *(5 * first), "norm"]
    assert [place for place, _, _ in seen] == wanted
    widths = {"qkv": 384, "fc1": 512, "act": 512}
    assert all(shape[2] == widths.get(place, 128) for place, _, shape in seen)
    assert {layer for place, layer, _ in seen if place == "act"} == set(range(5))
    # Nothing after the last attention reads more than the class token.
    assert [shape[1] for place, _, shape in seen if place == "fc2"] == [37, 37, 37, 37, 1]


def test_activations_need_an_mlp_of_two_linear_layers():
    sizes = {"num_classes": 0, "embed_dim": 32, "depth": 1, "num_heads": 1}
    backbone = VisionTransformer(48, 8, mlp_layer=SwiGLU, **sizes)
    with pytest.raises(ValueError, match="part 'ssf' changes activations within .* has SwiGLU"):
        models.EmbeddingModel(backbone, method("ssf"), 16)
    models.EmbeddingModel(backbone, method("value_bias"), 16)(images(1))


def test_settings_of_a_part_are_found_by_their_name(monkeypatch):
    monkeypatch.setitem(config.METHODS, "ia3", config.Method("ia3", part="ia3"))
    whole = models.build("ia3", "mini_vit", 16, pretrained="random")
    model = models.build("ia3", "mini_vit", 16, pretrained="random", inner=False, lora_rank=2)
    assert hasattr(whole.part, "inner") and not hasattr(model.part, "inner")
    assert model.method.part_settings == {"inner": False} and model.method.lora_rank == 2

    stochastic = method("scale_shift", STOCHASTIC)
    assert models.with_own_settings(stochastic, {"std": 0.5})["part_settings"] == {
        "keep": 0.5,
        "place": "mlp",
        "std": 0.5,
    }
    chosen = {"part": "ia3", "part_settings": {"inner": True}, "inner": False}
    assert models.with_own_settings("linear", chosen) == {
        "part": "ia3",
        "part_settings": {"inner": False},
    }
    with pytest.raises(
        ValueError,
        match="unknown setting 'iner'; did you mean 'inner'.*part 'ia3': inner; of a method: tune",
    ):
        models.build("ia3", "mini_vit", 16, pretrained="random", iner=False)
    with pytest.raises(ValueError, match="method 'ia3': inner = 'x'|inner = 'x'"):
        models.build("ia3", "mini_vit", 16, pretrained="random", inner="x")


def test_a_setting_that_two_have_is_refused():
    file = Path(models.__path__[-1]) / "ia3.py"
    file.write_text(IA3.replace("inner", "lora_rank"), encoding="utf-8")
    with pytest.raises(
        ValueError, match="'lora_rank' is a setting of .* and of its part 'ia3': rename"
    ):
        models.build(method("ia3"), "mini_vit", 16, pretrained="random", lora_rank=4)


REFUSED = {
    "unknown part 'scale_shif'; near: scale_shift; .* pumalib/models/<part>.py": ("scale_shif", {}),
    "unknown part '../scale_shift'": ("../scale_shift", {}),
    "unknown part 'os'": ("os", {}),
    "pumalib.models.no_part is no part of a method: .* Settings and .* Part": ("no_part", {}),
    "pumalib.models.puma is no part of a method": ("puma", {}),
    "part 'scale_shift': unknown setting 'kep'; did you mean 'keep'": ("scale_shift", {"kep": 1}),
    "part 'scale_shift': place = 'attn'": ("scale_shift", {"place": "attn"}),
    "part 'scale_shift': std = 'x'": ("scale_shift", {"std": "x"}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_part_or_no_setting_is_refused(message):
    part, settings = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        models.build(method(part, settings), "mini_vit", pretrained="random")


def test_a_part_needs_a_plain_vision_transformer():
    with pytest.raises(ValueError, match="ResNet has none"):
        models.build(method("scale_shift"), "resnet18", pretrained="random")


def test_settings_may_check_themselves():
    """Settings that are a pydantic dataclass keep their own strictness."""
    strict = Path(models.__path__[-1]) / "scale_shift.py"
    source = SCALE_SHIFT.replace("from dataclasses import", "from pydantic.dataclasses import")
    source = source.replace("(frozen=True)", '(frozen=True, config={"extra": "forbid"})')
    strict.write_text(source, encoding="utf-8")
    with pytest.raises(ValueError, match="unknown setting 'kep'"):
        models.build(method("scale_shift", {"kep": 1}), "mini_vit", pretrained="random")
    model = models.build(method("scale_shift", STOCHASTIC), "mini_vit", pretrained="random")
    assert model.part.gate.keep == 0.5


def test_a_part_and_its_settings_are_in_the_name_of_a_run():
    run = config.Run(method=config.METHODS["puma"])
    changed = dataclasses.replace(run, method=method("scale_shift"))
    other = dataclasses.replace(run, method=method("scale_shift", {"keep": 0.5}))
    names = {made.fingerprint("data", "weights") for made in (run, changed, other)}
    assert len(names) == 3
