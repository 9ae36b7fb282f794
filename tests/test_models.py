"""The models against the paper's equations and parameter counts, and what they refuse."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from PIL import Image

from pumalib import config, models
from pumalib.models import backbones
from pumalib.models.baselines import LoRA
from pumalib.models.puma import PromptPool, StochasticAdapter, draw_gates

DEIT = Path(__file__).resolve().parents[2] / "shared" / "weights" / "deit_tiny_patch16_224.safetensors"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def build(method, **settings):
    """A method on an untrained mini_vit, its zero-initialised parts made random so that they matter."""
    model = models.build(method, "mini_vit", 16, pretrained="random", **settings)
    for name, parameter in model.named_parameters():
        if ".up." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def images(count=3):
    return torch.randn(count, 3, 32, 32)


# ---- counts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method, trainable", [
    ("full", 21_665_664 + 49_280), ("linear", 49_280), ("mlp3", 5_247_104), ("vpt", 49_280 + 3_072),
    ("lora", 49_280 + 2_359_296), ("adaptformer", 49_280 + 2_359_296), ("adapter", 49_280 + 2_359_296),
    ("prompt-pool", 49_280 + 76_800), ("puma", 2_485_376), ("puma+lora", 2_485_376 + 2_359_296),
])  # fmt: skip
def test_parameter_counts_on_vit_small(method, trainable):
    model = models.build(method, "vit_small_patch16_224", 128, pretrained=False)
    count, total = models.count_parameters(model)
    assert count == trainable
    assert total == (trainable if method == "full" else 21_665_664 + trainable)


# ---- the equations ---------------------------------------------------------------------------------------------


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
    assert (gates.mean(-1) - 1).abs().max() < 0.1  # divided by p: expectation 1 in every layer and branch
    correlation = torch.corrcoef(gates.flatten(0, 1)) - torch.eye(12)
    assert correlation.abs().max() < 0.06  # independent
    assert draw_gates(0.25, 6, 50, per="batch").shape == (6, 2, 1)
    assert set(draw_gates(0.25, 6, 50, divide=False).unique().tolist()) == {0.0, 1.0}
    assert draw_gates(0.0, 2, 3).eq(0).all()


def test_prompt_pool_is_equations_6_to_9():
    pool = PromptPool(6, prompts=3, length=2)
    torch.nn.init.normal_(pool.prompts)
    patches = torch.randn(2, 5, 6)
    prompt, weights = pool(patches)
    for b in range(2):
        query = patches[b].mean(0) + patches[b].max(0).values
        expected = torch.zeros(2, 6)
        for m in range(3):
            alpha = F.cosine_similarity(query * pool.attention[m], pool.keys[m], dim=0)
            torch.testing.assert_close(weights[b, m], alpha)
            expected += alpha * pool.prompts[m]
        torch.testing.assert_close(prompt[b], expected)


def test_softmax_attention_is_the_codes_variant():
    pool = PromptPool(6, prompts=3, length=2, attention="softmax")
    patches = torch.randn(1, 5, 6)
    query = patches[0].mean(0) + patches[0].max(0).values
    expected = F.cosine_similarity(query * pool.attention.softmax(-1), pool.keys, dim=-1)
    torch.testing.assert_close(pool.weights(patches)[0], expected)


def test_puma_is_equations_2_to_10_written_out():
    model = build("puma", prompts=4, prompt_length=2, adapter_rank=8).train()
    x, vit, gates = images(), model.backbone, model.draw_gates(3)
    patches = vit.patch_embed(x)
    prompt, _ = model.prompt(patches)
    cls = (vit.cls_token + vit.pos_embed[:, :1]).expand(3, -1, -1)
    z = torch.cat([cls, prompt, patches + vit.pos_embed[:, 1:]], 1)  # Eq. 10: prompts without a position
    for layer, block in enumerate(vit.blocks):
        msa, mlp = (model.adapters[layer][branch] for branch in ("attn", "mlp"))
        h = block.norm1(z)
        z = block.attn(h) + z + gates["adapter"][layer, 0][:, None, None] * msa(h)
        h = block.norm2(z)
        z = block.mlp(h) + z + gates["adapter"][layer, 1][:, None, None] * mlp(h)
    expected = F.normalize(model.head(vit.norm(z)[:, 0]), dim=-1)
    torch.testing.assert_close(model(x, gates), expected)


def test_lora_is_a_low_rank_change_of_two_products():
    lora = LoRA(6, 2, targets="qk", scale=3.0)
    for up in lora.up:
        torch.nn.init.normal_(up.weight)
    h, qkv = torch.randn(2, 5, 6), torch.randn(2, 5, 18)
    q, k, v = qkv.chunk(3, -1)
    expected = [q + 3 * lora.up[0](lora.down[0](h)), k + 3 * lora.up[1](lora.down[1](h)), v]
    torch.testing.assert_close(lora(h, qkv), expected)


# ---- what a method is at its start and its limits ----------------------------------------------------------------


@pytest.mark.parametrize("method", ["lora", "lora-stochastic", "adaptformer", "adapter", "adapter-stochastic"])
@pytest.mark.parametrize("training", [True, False])
def test_zero_up_projections_leave_the_backbone_unchanged(method, training):
    model = models.build(method, "mini_vit", 16, pretrained="random").train(training)
    x = images()
    expected = F.normalize(model.head(model.backbone(x)), dim=-1)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("settings", [
    dict(adapter_keep=0.0, prompts=0), dict(prompt_length=0, adapter_rank=0), dict(adapter_keep=0.0, prompts=0, adapter_divide=False),
])  # fmt: skip
@pytest.mark.parametrize("training", [True, False])
def test_nothing_left_of_puma_is_linear(settings, training):
    model = build("puma", **settings).train(training)
    x = images()
    torch.testing.assert_close(model(x), F.normalize(model.head(model.backbone(x)), dim=-1))


def test_adapters_are_always_on_at_test():
    model = build("adapter-stochastic").eval()
    always = build("adapter").eval()
    always.load_state_dict(model.state_dict())
    x = images()
    assert torch.equal(model(x), always(x)) and torch.equal(model(x), model(x))
    undivided = build("adapter-stochastic", adapter_divide=False).eval()
    undivided.load_state_dict(model.state_dict())
    half = build("adapter", adapter_scale=0.05).eval()
    half.load_state_dict(model.state_dict())
    torch.testing.assert_close(undivided(x), half(x))  # times p = 0.5 at test


def test_adapter_layers_limits_puma_to_the_first_layers():
    model = build("puma", adapter_layers=2)
    assert len(model.adapters) == 2
    model(images()).sum().backward()
    assert all(p.grad is not None for p in model.adapters.parameters())


def test_frozen_means_frozen():
    model = build("puma").train()
    before = backbones.state_digest(model.backbone)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        model(images()).square().sum().backward()
        optimizer.step()
    assert backbones.state_digest(model.backbone) == before
    assert all(p.grad is None and not p.requires_grad for p in model.backbone.parameters())
    assert not model.backbone.training


@pytest.mark.parametrize("method", [name for name in config.METHODS if name != "pretrained"])  # it trains nothing
def test_every_method_trains_what_it_says_and_evaluates_alike_twice(method):
    model = build(method).train()
    embeddings = model(images(), gates={})  # every gate open
    torch.testing.assert_close(embeddings.norm(dim=-1), torch.ones(3))
    (embeddings * torch.randn_like(embeddings)).sum().backward()
    silent = [n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert not silent
    model.eval()
    x = images()
    assert torch.equal(model(x), model(x))


def test_prompt_weights_come_with_the_same_pass():
    model = build("puma").eval()
    x = images()
    embeddings, weights = model(x, prompt_weights=True)
    assert weights.shape == (3, 20) and torch.equal(embeddings, model(x))
    assert build("linear").eval()(x, prompt_weights=True)[1] is None


@pytest.mark.parametrize("name", [
    "deit_tiny_distilled_patch16_224", "vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2", "vit_base_patch32_clip_224",
])  # fmt: skip
def test_other_families_keep_their_tokens_and_pooling(name):
    size = 28 if "14" in name else 64
    backbone = timm.create_model(name, num_classes=0, img_size=size).eval()
    x = torch.randn(2, 3, size, size)
    model = models.EmbeddingModel(backbone, config.METHODS["adapter"], 16).eval()
    torch.testing.assert_close(model(x), F.normalize(model.head(backbone(x)), dim=-1))
    puma = models.EmbeddingModel(backbone, config.METHODS["puma"], 16).eval()
    assert puma(x).shape == (2, 16)


# ---- weights, saving, loading -------------------------------------------------------------------------------------


def test_save_and_load_and_embed(tmp_path):
    run = config.Run(data=config.Data(image_size=32), method=config.METHODS["puma"], dim=16, pretrained="random")
    model = build("puma").eval()
    file = models.save(model, run, tmp_path)
    assert file.is_file()
    loaded = models.load(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    embeddings = loaded.embed(list(pixels))
    mean_std_half = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 * 2 - 1
    np.testing.assert_allclose(embeddings, model(mean_std_half).detach().numpy(), atol=1e-5)
    assert embeddings.dtype == np.float32 and loaded.embed([]).shape == (0, 16)
    names = [tmp_path / f"{i}.png" for i in range(2)]
    for name, image in zip(names, pixels, strict=True):
        Image.fromarray(image).resize((40, 50)).save(name)
    assert loaded.embed(names).shape == (2, 16)
    np.testing.assert_allclose(loaded.embed([Image.open(names[0])]), loaded.embed(names[:1]), atol=0.02)


def test_a_saved_model_holds_what_was_trained_alone_and_refuses_another_backbone(tmp_path):
    for seed, name in ((1, "one"), (2, "two")):
        torch.manual_seed(seed)
        safetensors.torch.save_file(backbones.mini_vit().state_dict(), tmp_path / f"{name}.safetensors")
    run = config.Run(data=config.Data(image_size=32), dim=16, pretrained=str(tmp_path / "one.safetensors"))
    model = models.build("puma", "mini_vit", 16, pretrained=run.pretrained)
    file = models.save(model, run, tmp_path)
    assert file.stat().st_size < 4 * models.count_parameters(model)[0] + 10_000
    x = images()
    assert torch.equal(models.load(tmp_path).model(x), model.eval()(x))
    with pytest.raises(ValueError, match="adapts another backbone than 'mini_vit'"):
        models.load(tmp_path, pretrained=tmp_path / "two.safetensors")
    with pytest.raises(FileNotFoundError, match="no model.safetensors in"):
        models.load(tmp_path / "nowhere")


def test_weights_of_the_wrong_shape_are_refused_by_name(tmp_path):
    file = tmp_path / "small.safetensors"
    state = backbones.mini_vit().state_dict()
    safetensors.torch.save_file({**state, "norm.weight": torch.ones(3)}, file)
    with pytest.raises(ValueError, match=r"small.safetensors does not fit backbone 'mini_vit': norm.weight is \(3,\)"):
        models.build("linear", "mini_vit", 16, pretrained=str(file))
    del state["norm.weight"]
    safetensors.torch.save_file(state, file)
    with pytest.raises(ValueError, match="1 missing, 0 unknown"):
        models.build("linear", "mini_vit", 16, pretrained=str(file))
    file.write_bytes(b"no weights at all")
    with pytest.raises(ValueError, match="cannot be read as weights"):
        models.build("linear", "mini_vit", 16, pretrained=str(file))
    with pytest.raises(FileNotFoundError, match="no weights at .*nothing.pth"):
        models.build("linear", "mini_vit", 16, pretrained="nothing.pth")


def test_unknown_names_and_impossible_methods():
    with pytest.raises(ValueError, match="unknown backbone 'vit_smal_patch16_224'; near: vit_small_patch16_224"):
        models.build("linear", "vit_smal_patch16_224", pretrained=False)
    with pytest.raises(ValueError, match="unknown backbone 'mini_vit_32'; near: mini_vit, mini_vit_64; known: mini_vit, mini_vit_64 and timm's"):
        models.build("linear", "mini_vit_32", pretrained="embedded")
    with pytest.raises(ValueError, match="backbone mini_vit_64 takes 32 px images, not image_size = 64"):
        models.build("linear", "mini_vit_64", pretrained="embedded", image_size=64)
    with pytest.raises(ValueError, match=r"mini_vit.safetensors does not fit backbone 'mini_vit_64': cls_token is \(1, 1, 128\)"):
        models.build("linear", "mini_vit_64", pretrained=str(backbones.embedded_weights("mini_vit")))
    with pytest.raises(ValueError, match="unknown method 'adaptor'; known: "):
        models.build("adaptor", "mini_vit", pretrained=False)
    with pytest.raises(ValueError, match="ResNet has none: use 'full', 'linear' or 'mlp3'"):
        models.build("puma", "resnet18", pretrained=False)
    with pytest.raises(ValueError, match="'embedded' is only for mini_vit, mini_vit_64; for 'vit_tiny_patch16_224'"):
        models.build("linear", "vit_tiny_patch16_224", pretrained="embedded")


def test_without_a_network_the_hub_error_says_what_to_do(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(timm, "create_model", unreachable)
    with pytest.raises(FileNotFoundError, match=r"ConnectionError: no route\). On a machine with a network: .* pretrained = <that file>"):
        models.build("linear", "vit_tiny_patch16_224.augreg_in21k")


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
