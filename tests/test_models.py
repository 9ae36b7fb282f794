"""The models against the paper's equations and parameter counts, and what a method is at its start and its limits."""

import pytest
import torch
import torch.nn.functional as F

from pumalib import config, models
from pumalib.models import backbones
from pumalib.models.peft import LoRA
from pumalib.models.puma import PromptPool, StochasticAdapter, draw_gates

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


def build(method, **settings):
    """A method on an untrained mini_vit, its zero-initialised parts made random so that they matter."""
    model = models.build(method, "mini_vit", 16, pretrained="random", **settings)
    for name, parameter in model.named_parameters():
        if ".up." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def images(count=3):
    return torch.randn(count, 3, 32, 32)


@pytest.mark.parametrize("method", TRAINABLE)
def test_parameter_counts_on_vit_small(method):
    assert (ADAPTERS, POOL, TRAINABLE["puma"], TRAINABLE["mlp3"]) == (2_359_296, 76_800, 2_485_376, 5_247_104)
    with torch.device("meta"):
        trainable, total = models.count_parameters(models.build(method, "vit_small_patch16_224", pretrained=False))
    assert trainable == TRAINABLE[method]
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
            attended = query * (pool.attention[m] if attention == "free" else pool.attention[m].softmax(0))
            alpha = attended @ pool.keys[m] / attended.norm() / pool.keys[m].norm()
            torch.testing.assert_close(weights[b, m], alpha)
            expected += alpha * pool.prompts[m]
        torch.testing.assert_close(prompt[b], expected)


@pytest.mark.parametrize("position", ["none", "cls"])
def test_puma_is_equations_2_to_10_written_out(position):
    model = build("puma", prompts=4, prompt_length=2, adapter_rank=8, prompt_position=position).train()
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


def test_vpt_deep_replaces_its_tokens_before_every_layer():
    model = build("vpt-deep", prompt_length=2).eval()
    x, vit = images(), model.backbone
    z = vit._pos_embed(vit.patch_embed(x))
    z = torch.cat([z[:, :1], torch.empty(3, 2, 128), z[:, 1:]], 1)
    for block, prompt in zip(vit.blocks, model.prompt.prompts, strict=True):
        z = block(torch.cat([z[:, :1], prompt.expand(3, -1, -1), z[:, 3:]], 1))
    torch.testing.assert_close(model(x), F.normalize(model.head(vit.norm(z)[:, 0]), dim=-1))


def test_lora_is_a_low_rank_change_of_two_products():
    attn, lora = backbones.mini_vit(64).blocks[0].attn, LoRA(64, 2, targets="qk", scale=3.0)
    for up in lora.up:
        torch.nn.init.normal_(up.weight)
    h, gate = torch.randn(2, 5, 64), torch.tensor([0.0, 2.0])
    weight = attn.qkv.weight.clone()
    for b in range(2):  # the change as weights: W + gamma * s * up down
        change = torch.cat([up.weight @ down.weight for up, down in zip(lora.up, lora.down, strict=True)])
        attn.qkv.weight.data = weight + F.pad(3 * gate[b] * change, (0, 0, 0, 64))
        expected = attn(h[b : b + 1])
        attn.qkv.weight.data = weight
        torch.testing.assert_close(lora(attn, h, gate)[b : b + 1], expected, atol=1e-4, rtol=1e-4)


# ---- what a method is at its start and its limits ----------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("method", ["lora", "lora-stochastic", "adaptformer", "adapter", "adapter-stochastic"])
def test_zero_up_projections_leave_the_backbone_unchanged(method, training):
    model = models.build(method, "mini_vit", 16, pretrained="random").train(training)
    x = images()
    torch.testing.assert_close(model(x), F.normalize(model.head(model.backbone(x)), dim=-1))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "off", [{"adapter_keep": 0.0}, {"adapter_rank": 0}, {"adapter_keep": 0.0, "adapter_divide": False}]
)
def test_nothing_left_of_puma_is_linear(off, training):
    model = build("puma", prompt_length=0, **off).train(training)
    x = images()
    torch.testing.assert_close(model(x), F.normalize(model.head(model.backbone(x)), dim=-1))


def test_adapters_are_always_on_at_test():
    model, x = build("adapter-stochastic").eval(), images()

    def alike(method, **settings):
        other = build(method, **settings).eval()
        other.load_state_dict(model.state_dict())
        return other(x)

    assert torch.equal(model(x), alike("adapter")) and torch.equal(model(x), model(x, gates={}))
    # times p = 0.5 at test, if not divided by p in training
    torch.testing.assert_close(alike("adapter-stochastic", adapter_divide=False), alike("adapter", adapter_scale=0.05))


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
    embeddings, weights = model(x, prompt_weights=True)
    assert torch.equal(embeddings, model(x))
    assert weights.shape == (3, model.method.prompts) if model.method.prompts > 1 else weights is None


def test_adapter_layers_limits_puma_to_the_first_layers():
    model = build("puma", adapter_layers=2).train()
    assert len(model.adapters) == 2
    model(images(), gates={}).sum().backward()
    assert all(p.grad.any() for p in model.adapters.parameters())


def test_a_closed_adapter_has_a_gradient_of_zero_not_none():
    model = build("puma").train()
    gates = {name: torch.zeros_like(gate) for name, gate in model.draw_gates(3).items()}
    model(images(), gates).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.adapters.parameters())
