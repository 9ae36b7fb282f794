"""The models against the paper: equations, parameter counts; other backbones, refusals."""

import dataclasses
import time
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import nn

from pumalib import config, losses, models
from pumalib.models import backbones
from pumalib.models.embedding import EmbeddingModel, _attend
from pumalib.models.lora import LowRank
from pumalib.models.puma import PromptPool, StochasticAdapter, draw_gates

DEIT = (
    Path(__file__).resolve().parents[2] / "shared" / "weights" / "deit_tiny_patch16_224.safetensors"
)
HEAD, ADAPTERS, POOL = 384 * 128 + 128, 12 * 2 * 2 * 384 * 128, 20 * (8 + 1 + 1) * 384
TRAINABLE = {
    "full": 21_665_664 + HEAD,
    "linear": HEAD,
    "mlp3": 384 * 2048 + 2048 + 2048 * 2048 + 2048 + 2048 * 128 + 128,
    "vpt": HEAD + 8 * 384,
    "lora": HEAD + ADAPTERS,
    "adaptformer": HEAD + ADAPTERS,
    "adapter": HEAD + ADAPTERS,
    "prompt-pool": HEAD + POOL,
    "puma": HEAD + ADAPTERS + POOL,
    "puma+lora": HEAD + ADAPTERS + POOL + ADAPTERS,
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def matter(model):
    """The model, its zero-initialised parts made random so that they matter."""
    for name, parameter in model.named_parameters():
        if ".up." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def build(method, **settings):
    return matter(models.build(method, "mini_vit", 16, pretrained="random", **settings))


def tiny(method):
    vit = VisionTransformer(
        img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=0
    )
    return matter(EmbeddingModel(vit, config.method(method), 8))


def images(count=3):
    return torch.randn(count, 3, 48, 48)


@pytest.mark.parametrize("method", TRAINABLE)
def test_parameter_counts_on_vit_small(method):
    assert (ADAPTERS, POOL, TRAINABLE["puma"], TRAINABLE["mlp3"]) == (
        2_359_296,
        76_800,
        2_485_376,
        5_247_104,
    )
    with torch.device("meta"):
        trainable, total = models.count_parameters(
            models.build(method, "vit_small_patch16_224", pretrained=False)
        )
    assert trainable == TRAINABLE[method]
    assert total == (trainable if method == "full" else 21_665_664 + trainable)


def test_adapter_is_equation_4_with_its_gate_and_scale():
    adapter = StochasticAdapter(6, 4, scale=0.1)
    torch.nn.init.normal_(adapter.up.weight)
    h, gate = torch.randn(2, 5, 6), torch.tensor([0.0, 2.0])
    expected = 0.1 * torch.relu(h @ adapter.down.weight.T) @ adapter.up.weight.T
    torch.testing.assert_close(adapter(h), expected)
    torch.testing.assert_close(adapter(h, gate), gate[:, None, None] * expected)


def test_gates_are_bernoulli_per_sample_layer_and_branch():
    gates = draw_gates(0.25, 6, 5000, generator=torch.Generator().manual_seed(0))
    assert gates.shape == (6, 2, 5000) and set(gates.unique().tolist()) == {0.0, 4.0}
    assert (
        gates.mean(-1) - 1
    ).abs().max() < 0.1  # divided by p: expectation 1 in every layer and branch
    correlation = torch.corrcoef(gates.flatten(0, 1)) - torch.eye(12)
    assert correlation.abs().max() < 0.06  # independent
    assert draw_gates(0.25, 6, 50, per="batch").shape == (6, 2, 1)
    assert set(draw_gates(0.25, 6, 50, divide=False).unique().tolist()) == {0.0, 1.0}
    assert draw_gates(0.0, 2, 3).eq(0).all()


DRAWN = {
    "constant": [True, True, True, True],
    "early": [True, True, False, False],
    "late": [False, False, True, True],
}


@pytest.mark.parametrize("schedule, drawn", DRAWN.items())
def test_gates_are_drawn_in_the_half_of_the_training_that_the_schedule_says(schedule, drawn):
    model = build("puma+lora-stochastic", adapter_schedule=schedule).train()
    for progress, is_drawn in zip((0.0, 0.499, 0.5, 0.999), drawn):
        generator = torch.Generator().manual_seed(3)
        gates = model.draw_gates(50, generator, progress)
        if not is_drawn:
            assert gates == {}, "every gate is open, and nothing is drawn"
            assert generator.get_state().equal(torch.Generator().manual_seed(3).get_state())
            continue
        always = build("puma+lora-stochastic").train()
        expected = always.draw_gates(50, torch.Generator().manual_seed(3))
        assert gates.keys() == expected.keys() == {"adapter", "lora"}
        assert all(gates[name].equal(expected[name]) for name in gates)


@pytest.mark.parametrize(
    "schedule, divide, expected",
    [
        ("constant", True, 1.0),
        ("late", True, 1.0),
        ("early", True, 1.0),
        ("constant", False, 0.25),
        ("late", False, 0.25),
        ("early", False, 1.0),
    ],
)
def test_the_gate_at_test_is_the_expectation_at_the_end_of_training(schedule, divide, expected):
    settings = {"adapter_keep": 0.25, "adapter_divide": divide, "adapter_schedule": schedule}
    model = build("puma", **settings)
    generator = torch.Generator().manual_seed(0)
    last = model.train().draw_gates(20_000, generator, 0.999)
    mean = 1.0 if last == {} else float(last["adapter"].mean())
    at_test = model.eval().draw_gates(3)
    gate = 1.0 if at_test == {} else float(at_test["adapter"].unique())
    assert gate == expected == pytest.approx(mean, abs=0.02)


@pytest.mark.parametrize("attention", ["free", "softmax"])
def test_prompt_pool_is_equations_6_to_9(attention):
    pool = PromptPool(6, prompts=3, length=2, attention=attention)
    torch.nn.init.normal_(pool.prompts)
    patches = torch.randn(2, 5, 6)
    prompt, weights = pool(patches)
    for b in range(2):
        query = patches[b].mean(0) + patches[b].max(0).values
        expected = torch.zeros(2, 6)
        for m in range(3):
            attended = query * (
                pool.attention[m] if attention == "free" else pool.attention[m].softmax(0)
            )
            alpha = attended @ pool.keys[m] / attended.norm() / pool.keys[m].norm()
            torch.testing.assert_close(weights[b, m], alpha)
            expected += alpha * pool.prompts[m]
        torch.testing.assert_close(prompt[b], expected)


@pytest.mark.parametrize("position", ["none", "cls"])
def test_puma_is_equations_2_to_10_written_out(position):
    model = build(
        "puma", prompts=4, prompt_length=2, adapter_rank=8, prompt_position=position
    ).train()
    x, vit, gates = images(), model.backbone, model.draw_gates(3)
    patches = vit.patch_embed(x)
    prompt, _ = model.prompt(patches)
    cls = (vit.cls_token + vit.pos_embed[:, :1]).expand(3, -1, -1)
    if position == "cls":
        prompt = prompt + vit.pos_embed[:, :1]
    z = torch.cat([cls, prompt, patches + vit.pos_embed[:, 1:]], 1)
    for layer, block in enumerate(vit.blocks):
        msa, mlp = (model.adapters[layer][branch] for branch in ("attn", "mlp"))
        h = block.norm1(z)
        z = block.attn(h) + z + gates["adapter"][layer, 0][:, None, None] * msa(h)
        h = block.norm2(z)
        z = block.mlp(h) + z + gates["adapter"][layer, 1][:, None, None] * mlp(h)
    expected = F.normalize(model.head(vit.norm(z)[:, 0]), dim=-1)
    torch.testing.assert_close(model(x, gates), expected)


def test_without_a_class_token_prompts_have_no_position():
    """The first position is then the first patch's."""
    settings = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
    vit = VisionTransformer(**settings, num_classes=0, class_token=False, global_pool="avg")
    model = matter(EmbeddingModel(vit, config.method("vpt"), 8))
    patches = vit.patch_embed(torch.randn(2, 3, 16, 16))
    given, _ = model.parts[0].tokens(patches, 0, None)
    with_prompts, _ = model._with_tokens(patches, patches, 0, [0] * len(model.parts), {})
    torch.testing.assert_close(with_prompts[:, : given.shape[1]], given)


def test_lora_is_a_low_rank_change_of_two_products():
    attn = backbones.mini_vit(64).blocks[0].attn
    lora = LowRank(64, 2, targets="qk", scale=3.0)
    for up in lora.up:
        torch.nn.init.normal_(up.weight)
    h = torch.randn(2, 5, 64)
    gate = torch.tensor([0.0, 2.0])
    products = lora(h, list(attn.qkv(h).chunk(3, dim=-1)), gate)
    weight = attn.qkv.weight.clone()
    for b in range(2):
        # The change as weights: W + gamma * s * up down, and none of the value.
        change = torch.cat([up.weight @ down.weight for up, down in zip(lora.up, lora.down)])
        attn.qkv.weight.data = weight + F.pad(3 * gate[b] * change, (0, 0, 0, 64))
        expected = attn.qkv(h[b : b + 1])
        found = torch.cat([product[b : b + 1] for product in products], dim=-1)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fused", [True, False])
def test_attention_of_changed_products_is_that_of_timm(fused):
    """Also with norms of query, key and output, which some models have."""
    attn = Attention(64, 2, qkv_bias=True, qk_norm=True, scale_norm=True, norm_layer=nn.LayerNorm)
    attn.fused_attn = fused
    h = torch.randn(2, 5, 64)
    found = _attend(attn, list(attn.qkv(h).chunk(3, dim=-1)))
    torch.testing.assert_close(found, attn(h))


PARTS = ("lora", "lora-stochastic", "adaptformer", "adapter", "adapter-stochastic")
CLOSED = {"adapter_keep": 0.0}, {"adapter_rank": 0}, {"adapter_keep": 0.0, "adapter_divide": False}
NOTHING = [(method, {}) for method in PARTS] + [
    ("puma", {"prompt_length": 0, **settings}) for settings in CLOSED
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("method, settings", NOTHING)
def test_untrained_or_closed_parts_leave_the_backbone_unchanged(method, settings, training):
    made = (
        build
        if settings
        else partial(models.build, backbone="mini_vit", dim=16, pretrained="random")
    )
    model, x = made(method, **settings).train(training), images()
    torch.testing.assert_close(model(x), F.normalize(model.head(model.backbone(x)), dim=-1))


def test_adapters_are_always_on_at_test():
    model, x = build("adapter-stochastic").eval(), images()

    def alike(method, **settings):
        other = build(method, **settings).eval()
        other.load_state_dict(model.state_dict())
        return other(x)

    assert torch.equal(model(x), alike("adapter")) and torch.equal(model(x), model(x, gates={}))
    # times p = 0.5 at test, if not divided by p in training
    torch.testing.assert_close(
        alike("adapter-stochastic", adapter_divide=False), alike("adapter", adapter_scale=0.05)
    )


@pytest.mark.parametrize(
    "method", [name for name in config.METHODS if name not in ("pretrained", "whitened")]
)  # it trains nothing
def test_every_method_trains_what_it_says_and_evaluates_alike_twice(method):
    model = build(method).train()
    with torch.no_grad():
        for parameter in model.parameters():
            # A factor beside one that begins as zeros, as in LoRA, has no gradient at first.
            if parameter.requires_grad and not parameter.any():
                parameter.normal_(std=0.02)
    embeddings = model(images(), gates={})  # every gate open
    torch.testing.assert_close(embeddings.norm(dim=-1), torch.ones(3))
    (embeddings * torch.randn_like(embeddings)).sum().backward()
    silent = [
        n
        for n, p in model.named_parameters()
        if p.requires_grad and (p.grad is None or not p.grad.any())
    ]
    assert (
        not silent and model.backbone.training == model.method.tune_backbone
    )  # frozen means frozen
    assert model.method.tune_backbone or all(p.grad is None for p in model.backbone.parameters())
    model.eval()
    x = images()
    embeddings, weights = model(x, prompt_weights=True)
    assert torch.equal(embeddings, model(x))
    assert (
        weights.shape == (3, model.method.prompts) if model.method.prompts > 1 else weights is None
    )


def gradients(model, images, gates):
    """Embeddings of a pass and the gradient of every trainable parameter."""
    model.zero_grad()
    embeddings = model(images, gates)
    target = torch.linspace(-1, 1, embeddings.numel()).view_as(embeddings)
    (embeddings * target).sum().backward()
    return embeddings.detach(), {
        name: p.grad for name, p in model.named_parameters() if p.requires_grad
    }


FAMILIES = [("deit_tiny_distilled_patch16_224", 32), ("vit_small_patch14_reg4_dinov2", 28)]


@pytest.mark.parametrize("name, size", [*FAMILIES, ("vit_xsmall_patch16_clip_224", 32)])
def test_puma_without_open_adapters_and_prompts_is_the_frozen_backbone(name, size):
    model = models.build(
        "puma", name, 16, pretrained=False, image_size=size, adapter_keep=0.0, prompts=0
    )
    model.adapters.requires_grad_(False).apply(
        lambda m: hasattr(m, "weight") and m.weight.normal_()
    )
    images = torch.randn(2, 3, size, size)
    expected = F.normalize(model.head(model.backbone.eval()(images)), dim=-1)
    for mode in (True, False):
        torch.testing.assert_close(model.train(mode)(images), expected)


def test_pooling_over_patches_leaves_prompts_out():
    vit = timm.create_model(
        "vit_tiny_patch16_224", num_classes=0, img_size=32, global_pool="avg", class_token=True
    )
    model = EmbeddingModel(vit, config.method("puma"), 16).eval()
    seen = []
    vit.fc_norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    vit.norm.register_forward_hook(lambda module, args, output: seen.append(output))
    model(torch.randn(2, 3, 32, 32))
    tokens, pooled = seen
    assert tokens.shape == (2, 1 + 8 + 4, 192)
    torch.testing.assert_close(pooled, tokens[:, 9:].mean(1))


def test_resnet_pools_average_and_maximum():
    model, images = (
        models.build("mlp3", "resnet18", 16, pretrained=False).eval(),
        torch.randn(2, 3, 64, 64),
    )
    features = model.backbone.forward_features(images)
    pooled = (features.mean((2, 3)) + features.amax((2, 3))) / 2
    torch.testing.assert_close(model(images), F.normalize(model.head(pooled), dim=-1))


def test_checkpoints_of_deit_and_of_data_parallel_training(tmp_path):
    name, file = "deit_tiny_distilled_patch16_224", tmp_path / "deit.pth"
    reference = timm.create_model(name, num_classes=0)
    state = {
        **reference.state_dict(),
        "head.weight": torch.ones(5, 192),
        "head_dist.weight": torch.ones(5, 192),
    }
    for saved in (
        {"model": state},
        {"state_dict": {f"module.{key}": value for key, value in state.items()}},
    ):
        torch.save(saved, file)
        made = backbones.create(name, file).state_dict()
        assert backbones.state_digest(made) == backbones.state_digest(reference.state_dict())
    torch.save({"student": state, "teacher": state}, file)
    with pytest.raises(
        ValueError, match="it holds student, teacher; save the part of it that is the network"
    ):
        backbones.create(name, file)


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path):
    file, state = tmp_path / "small.safetensors", backbones.mini_vit().state_dict()
    for wrong, message in (
        ("norm.weight", "size mismatch for norm.weight"),
        ("extra", "Unexpected.*extra"),
    ):
        safetensors.torch.save_file({**state, wrong: torch.ones(3)}, file)
        with pytest.raises(
            ValueError, match=f"small.safetensors .*not fit backbone 'mini_vit'.*{message}"
        ):
            backbones.create("mini_vit", file)
    with pytest.raises(FileNotFoundError, match=r"no weights at .*nothing.pth"):
        backbones.create("mini_vit", "nothing.pth")


@pytest.mark.skipif(not DEIT.is_file(), reason="../shared/weights is not here")
def test_real_weights_from_a_local_file():
    name = "deit_tiny_patch16_224"
    backbone = backbones.create(name, DEIT)
    stored = safetensors.torch.load_file(DEIT)
    assert torch.equal(backbone.blocks[0].attn.qkv.weight, stored["blocks.0.attn.qkv.weight"])
    assert backbones.normalisation(backbone)[0] == (0.485, 0.456, 0.406)
    assert backbones.create(name, DEIT, image_size=96).pos_embed.shape == (1, 37, 192)  # resampled


REFUSED = {
    "unknown backbone 'vit_smal_patch16_224'; near: vit_small_patch16_224": (
        "linear",
        "vit_smal_patch16_224",
    ),
    "unknown backbone 'mini_vit_32'; near: mini_vit, mini_vit_64; known: mini_vit and": (
        "linear",
        "mini_vit_32",
    ),
    "mini_vit_64 takes 48 px images, not image_size = 64": (
        "linear",
        "mini_vit_64",
        {"image_size": 64},
    ),
    "16 px: image_size = 100 is no multiple; 96 or 112": (
        "linear",
        "vit_tiny_patch16_224",
        {"image_size": 100},
    ),
    "unknown method 'adaptor'; did you mean 'adapter'": ("adaptor", "mini_vit"),
    "ResNet has none: use 'full', 'linear' or 'mlp3'": ("puma", "resnet18"),
    "'embedded' is only for mini_vit and mini_vit_64": (
        "linear",
        "vit_tiny_patch16_224",
        {"pretrained": "embedded"},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_unknown_names_and_impossible_methods(message):
    method, name, *options = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        models.build(method, name, **{"pretrained": False} | dict(*options))


SWIN = "swin_tiny_patch4_window7_224"
BEIT = "beit_base_patch16_224"


@pytest.mark.parametrize("name", [SWIN, BEIT])
def test_other_transformers_take_an_image_size(name):
    model = models.build("linear", name, 16, pretrained="random", image_size=64).eval()
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 16)


@pytest.mark.parametrize(
    ("name", "why"),
    [(SWIN, "SwinTransformer has none"), (BEIT, "Beit has none")],
    ids=["swin", "beit"],
)
def test_other_transformers_carry_no_adapters_and_it_says_why(name, why):
    with torch.device("meta"), pytest.raises(ValueError, match=f"plain blocks .* {why}"):
        models.build("puma", name, pretrained="random")


def test_an_image_size_that_a_model_cannot_have_is_refused_at_once():
    with pytest.raises(ValueError, match=r"twins_svt_small cannot .* image_size = 48 .* is 224"):
        backbones.create("twins_svt_small", "random", 48)
    with pytest.raises(ValueError, match="patches of 16 px: image_size = 100 is no multiple"):
        backbones.create(BEIT, "random", 100)


HUGE = {
    "adapter_rank = 1000000 on a backbone of width 128": ("adapter", {"adapter_rank": 10**6}),
    "lora_rank = 1000000 on a backbone of width 128": ("lora", {"lora_rank": 10**6}),
    "lora_rank = 20000 on": ("puma+lora", {"lora_rank": 20_000}),
    "prompts = 1000000000 of prompt_length = 8": ("puma", {"prompts": 10**9}),
    "prompts = 1 of prompt_length = 50000": ("vpt-deep", {"prompt_length": 50_000}),
}


@pytest.mark.parametrize("message", HUGE)
def test_what_would_dwarf_its_backbone_is_refused_before_it_is_made(message, monkeypatch):
    def made(*sizes):
        raise AssertionError("memory was asked for")

    method, settings = HUGE[message]
    # The sizes of a machine's memory differ, so none of it may be asked for.
    for part in ("Adapters", "LoRA", "PromptPool", "SinglePrompt"):
        monkeypatch.setattr(f"pumalib.models.embedding.{part}", made)
    whole = rf"{message}.* would have [\d,]+ parameters, .*; choose less \(.* the width, 128\)"
    with pytest.raises(ValueError, match=whole):
        models.build(method, "mini_vit", pretrained="random", **settings)


def test_a_pool_is_not_put_before_every_layer():
    method = dataclasses.replace(config.METHODS["vpt-deep"])
    # The model refuses the same values as the settings.
    object.__setattr__(method, "prompts", 20)
    with pytest.raises(ValueError, match=r"prompt_deep needs one prompt .* prompts = 20 is a pool"):
        EmbeddingModel(backbones.mini_vit(), method, 16)


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    """A hub from which nothing was downloaded yet."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))


SAVED_ELSEWHERE = r"On a machine .*vit_tiny.*state_dict.* pretrained = <that file>"


def test_without_a_network_the_hub_is_given_up_soon(empty_cache, monkeypatch):
    """Timm and the hub's client ask for two files, each six times with pauses: 47 seconds."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits to ask again"))
    with pytest.raises(FileNotFoundError, match=rf"no weights for .*{SAVED_ELSEWHERE}"):
        models.build("linear", "vit_tiny_patch16_224.augreg_in21k")


def test_what_was_fetched_before_needs_no_network(empty_cache, monkeypatch, tmp_path):
    name = "vit_tiny_patch16_224.augreg_in21k"
    weights = timm.create_model("vit_tiny_patch16_224", num_classes=0)
    repository = tmp_path / f"models--timm--{name}"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    safetensors.torch.save_file(weights.state_dict(), snapshot / "model.safetensors")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    made = backbones.create(name)
    assert torch.equal(made.pos_embed, weights.pos_embed)


def test_what_the_hub_does_not_give_is_said_with_a_remedy(monkeypatch):
    monkeypatch.setattr(backbones, "_ask_hub", lambda name: None)
    create = timm.create_model

    def without_hub(*args, pretrained=False, **options):
        return 1 / 0 if pretrained else create(*args, **options)

    monkeypatch.setattr(timm, "create_model", without_hub)
    with pytest.raises(FileNotFoundError, match=f"ZeroDivisionError.*{SAVED_ELSEWHERE}"):
        models.build("linear", "vit_tiny_patch16_224.augreg_in21k")


@pytest.mark.parametrize("method", ["full", "vpt-deep", "puma+lora-stochastic"])
@pytest.mark.parametrize("form", ["every token", "recomputed", "plain attention"])
def test_every_form_of_the_model_gives_the_same_gradients(method, form):
    model, computed = tiny(method).train(), []
    images, gates = torch.randn(3, 3, 16, 16), model.draw_gates(3)
    expected = gradients(model, images, gates)
    assert model.reads_class_token  # the last MLP needs the class token alone
    if form == "recomputed":
        model.backbone.blocks[0].norm1.register_forward_hook(lambda *_: computed.append(form))
    for part in model.modules() if form == "plain attention" else ():
        part.fused_attn = False
    model.recompute, model.reads_class_token = form == "recomputed", form != "every token"
    bound = 0 if form == "recomputed" else 1e-4
    torch.testing.assert_close(gradients(model, images, gates), expected, atol=bound, rtol=bound)
    assert len(computed) == 2 * model.recompute


def test_parts_start_as_in_the_authors_code_or_as_usual():
    start = partial(models.build, backbone="mini_vit", dim=16, pretrained="random")
    for kind, bound in (("code", (3 / 8) ** 0.5), ("usual", 128**-0.5)):
        layer = start("adapter", adapter_rank=8, start=kind).adapters[2]
        down = [layer[branch].down.weight for branch in ("attn", "mlp")]
        assert 0.95 * bound < down[0].abs().max() <= bound and not layer["mlp"].up.weight.any()
        assert torch.equal(*down) == (kind == "code")
    prompts, usual = (
        start("vpt", prompt_length=400, start=kind).prompt.prompts.detach()
        for kind in ("code", "usual")
    )
    assert (
        prompts.std() == pytest.approx(0.045 * 3**0.5, rel=0.02) and prompts.abs().max() < 0.136
    )  # D = 128, not 384
    assert usual.std() == pytest.approx(0.02, rel=0.02)
    head, orthogonal = start("linear").head, start("linear", start="usual").head.weight
    assert head.weight.abs().max() <= 128**-0.5 and head.bias.any()
    assert torch.allclose(orthogonal @ orthogonal.T, torch.eye(16), atol=1e-5)
    between = [type(start("mlp3", head=head).head[1]) for head in ("mlp3", "mlp3-relu")]
    assert between == [torch.nn.GELU, torch.nn.ReLU]
    for name in ("proxynca++", "proxyanchor", "cosface", "arcface", "curricularface"):
        assert losses.make(name, 50, 400).proxies.detach().std() == pytest.approx(0.2, rel=0.03)
