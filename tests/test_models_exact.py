"""The models against the paper's counts, other families of backbones, the files of others, and their own faster forms."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer

from pumalib import config, counts, models, paths, training
from pumalib.models import backbones, puma
from pumalib.models.embedding import EmbeddingModel


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def tiny(method, width=32, image_size=16, **settings):
    """A method on a ViT of two layers, with every part made random so that it matters."""
    vit = VisionTransformer(img_size=image_size, patch_size=8, embed_dim=width, depth=2, num_heads=2, num_classes=0)
    return randomised(EmbeddingModel(vit, config.method(method, **settings), 8))


def randomised(model):
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


# ---- counts ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table():
    return counts.parameters()


def test_counts_are_the_papers_but_for_three_rows_that_it_rounds_up(table):
    # 0.049, 5.247 and 0.052 M stand in Table 2 as 0.1, 5.3 and 0.1, and its totals add these to 21.7 (the backbone alone).
    differ = table[~table["agrees"]].set_index("row")
    assert list(differ.index) == ["Linear Emb.", "MLP-3 Emb.", "VPT"] and set(differ["table"]) == {2}
    tenths = differ[["trainable", "paper_trainable_m"]].assign(up=np.ceil(differ["trainable"] / 1e5) / 10)
    assert (tenths["up"] == tenths["paper_trainable_m"]).all()
    np.testing.assert_allclose(differ["paper_total_m"], 21.7 + differ["paper_trainable_m"].astype(float))
    assert len(table) == 45


def test_results_parameters_csv_is_what_the_models_count(table, tmp_path):
    written = pd.read_csv(paths.ROOT / "results" / "parameters.csv")
    again = pd.read_csv(counts.write(tmp_path / "parameters.csv"))
    pd.testing.assert_frame_equal(written, again)
    assert list(again["trainable"]) == list(table["trainable"])


@pytest.mark.parametrize("name", [*counts.BACKBONES.values(), "deit_small_distilled_patch16_224.fb_in1k", "vit_small_patch16_224.dino",
                                  "vit_base_patch16_clip_224.openai", "vit_base_patch16_clip_quickgelu_224.openai"])  # fmt: skip
def test_backbones_named_with_their_tags_are_timms(name):
    assert name in timm.list_pretrained(name.split(".")[0])
    with torch.device("meta"):
        model = models.build("puma", name, pretrained=False)
    assert model.reads_class_token and model.backbone.pretrained_cfg["num_classes"] == timm.get_pretrained_cfg(name).num_classes


def test_puma_on_vit_small_is_a_file_of_less_than_10_5_megabytes(tmp_path):
    run = config.Run(backbone="vit_small_patch16_224", pretrained="elsewhere.safetensors")
    model = models.build("puma", "vit_small_patch16_224", pretrained=False)
    assert models.save(model, run, tmp_path).stat().st_size < 10.5e6


# ---- other families ----------------------------------------------------------------------------------------------

FAMILIES = [("deit_tiny_distilled_patch16_224", 32), ("vit_small_patch14_reg4_dinov2", 28), ("vit_xsmall_patch16_clip_224", 32)]


@pytest.mark.parametrize("name, size", FAMILIES)
def test_puma_without_open_adapters_and_prompts_is_the_frozen_backbone(name, size):
    model = randomised(models.build("puma", name, 16, pretrained=False, image_size=size, adapter_keep=0.0, prompts=0))
    images = torch.randn(2, 3, size, size)
    expected = F.normalize(model.head(model.backbone.eval()(images)), dim=-1)
    for mode in (True, False):
        torch.testing.assert_close(model.train(mode)(images), expected)


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
    assert models.count_parameters(model)[0] == sum(p.numel() for p in model.head.parameters()) + (
        sum(p.numel() for p in model.backbone.parameters()) if method == "full" else 0
    )


@pytest.mark.parametrize("name, size", [("vit_tiny_patch16_224", 100), ("vit_small_patch14_dinov2", 224 + 2)])
def test_an_image_size_that_patches_do_not_tile_is_refused(name, size):
    with pytest.raises(ValueError, match=f"image_size = {size} is no multiple; {size // 16 * 16 if '16' in name else 224} or"):
        models.build("linear", name, pretrained=False, image_size=size)


# ---- files of weights ---------------------------------------------------------------------------------------------


def same(backbone, reference):
    return backbones.state_digest(backbone) == backbones.state_digest(reference)


def test_checkpoints_of_deit_and_of_data_parallel_training(tmp_path):
    reference = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=0)
    state = {**reference.state_dict(), "head.weight": torch.ones(5, 192), "head_dist.weight": torch.ones(5, 192)}
    torch.save({"model": state}, tmp_path / "deit.pth")
    assert same(backbones.create("deit_tiny_distilled_patch16_224", tmp_path / "deit.pth"), reference)
    torch.save({"state_dict": {f"module.{key}": value for key, value in reference.state_dict().items()}}, tmp_path / "ddp.pth")
    assert same(backbones.create("deit_tiny_distilled_patch16_224", tmp_path / "ddp.pth"), reference)
    torch.save({"student": reference.state_dict(), "teacher": reference.state_dict()}, tmp_path / "dino.pth")
    with pytest.raises(ValueError, match="it holds student, teacher, not one table of tensors"):
        backbones.create("deit_tiny_distilled_patch16_224", tmp_path / "dino.pth")


OPENAI = [("norm_pre", "ln_pre"), ("norm1", "ln_1"), ("norm2", "ln_2"), ("norm.", "ln_post."), ("blocks", "transformer.resblocks"),
          ("attn.qkv.", "attn.in_proj_"), ("attn.proj", "attn.out_proj"), ("mlp.fc1", "mlp.c_fc"), ("mlp.fc2", "mlp.c_proj"),
          ("patch_embed.proj", "conv1"), ("pos_embed", "positional_embedding"), ("cls_token", "class_embedding")]  # fmt: skip


def test_names_of_openais_clip(tmp_path):
    name = "vit_xsmall_patch16_clip_224"
    reference = timm.create_model(name, num_classes=0)
    state = {"visual.proj": torch.ones(256, 512)}
    for key, value in reference.state_dict().items():
        value = {"pos_embed": value[0], "cls_token": value.flatten()}.get(key, value)
        for timms, openais in OPENAI:
            key = key.replace(timms, openais)
        state[f"visual.{key}"] = value.contiguous()
    safetensors.torch.save_file(state, tmp_path / "clip.safetensors")
    assert same(backbones.create(name, tmp_path / "clip.safetensors"), reference)


def test_npz_of_the_original_vision_transformers(tmp_path):
    reference = timm.create_model("vit_tiny_patch16_224", num_classes=0)
    state = {key: value.numpy() for key, value in reference.state_dict().items()}
    arrays = {"cls": state["cls_token"], "Transformer/posembed_input/pos_embedding": state["pos_embed"],
              "embedding/kernel": state["patch_embed.proj.weight"].transpose(2, 3, 1, 0), "embedding/bias": state["patch_embed.proj.bias"],
              "Transformer/encoder_norm/scale": state["norm.weight"], "Transformer/encoder_norm/bias": state["norm.bias"]}  # fmt: skip
    for layer in range(12):
        old, new = f"blocks.{layer}.", f"Transformer/encoderblock_{layer}/"
        attention = new + "MultiHeadDotProductAttention_1/"
        for part, w, b in zip(("query", "key", "value"), np.split(state[old + "attn.qkv.weight"], 3),
                              np.split(state[old + "attn.qkv.bias"], 3), strict=True):  # fmt: skip
            arrays |= {f"{attention}{part}/kernel": w.T.reshape(192, 3, 64), f"{attention}{part}/bias": b.reshape(3, 64)}
        arrays |= {attention + "out/kernel": state[old + "attn.proj.weight"].T.reshape(3, 64, 192),
                   attention + "out/bias": state[old + "attn.proj.bias"]}  # fmt: skip
        for place, name in ((0, "norm1"), (2, "norm2")):
            arrays |= {f"{new}LayerNorm_{place}/scale": state[f"{old}{name}.weight"], f"{new}LayerNorm_{place}/bias": state[f"{old}{name}.bias"]}
        for place in (0, 1):
            arrays |= {f"{new}MlpBlock_3/Dense_{place}/kernel": state[f"{old}mlp.fc{place + 1}.weight"].T,
                       f"{new}MlpBlock_3/Dense_{place}/bias": state[f"{old}mlp.fc{place + 1}.bias"]}  # fmt: skip
    np.savez(tmp_path / "vit.npz", **arrays)
    assert same(backbones.create("vit_tiny_patch16_224", tmp_path / "vit.npz"), reference)
    with pytest.raises(ValueError, match="vit.npz cannot be read as weights of 'vit_small_patch16_224'"):
        backbones.create("vit_small_patch16_224", tmp_path / "vit.npz")


# ---- faster forms equal the equations -----------------------------------------------------------------------------


@pytest.mark.parametrize("per", ["sample", "batch"])
@pytest.mark.parametrize("method", ["puma", "adapter-stochastic", "puma+lora-stochastic"])
def test_leaving_out_images_with_closed_gates_changes_nothing(method, per, monkeypatch):
    model = tiny(method, adapter_gate=per).double().train()
    images, gates = torch.randn(6, 3, 16, 16).double(), model.draw_gates(6)
    gates["adapter"][0, 0] = 0  # an adapter closed for every image still has a gradient: zero, not none
    assert any(puma.can_skip(gate) for gate in gates["adapter"].flatten(0, 1))
    embeddings, grads = gradients(model, images, gates)
    monkeypatch.setattr(puma, "can_skip", lambda gate: False)
    expected, expected_grads = gradients(model, images, gates)
    torch.testing.assert_close(embeddings, expected)
    torch.testing.assert_close(grads, expected_grads)
    assert grads["adapters.0.attn.up.weight"].eq(0).all()


@pytest.mark.parametrize("name, size", [(None, 16), *FAMILIES[:2]])
@pytest.mark.parametrize("method", ["full", "puma+lora"])
def test_the_last_layer_needs_its_class_token_alone(method, name, size):
    if name is None:
        model = tiny(method)
    else:
        model = randomised(models.build(method, name, 8, pretrained=False, image_size=size))
    images, gates = torch.randn(3, 3, size, size), model.draw_gates(3)
    assert model.reads_class_token
    embeddings, grads = gradients(model.train(), images, gates)
    model.reads_class_token = False
    expected, expected_grads = gradients(model, images, gates)
    torch.testing.assert_close(embeddings, expected)
    torch.testing.assert_close(grads, expected_grads, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["full", "linear", "vpt-deep", "puma", "puma+lora-stochastic"])
def test_recomputing_activations_gives_the_same_gradients(method):
    model = tiny(method).train()
    images, gates = torch.randn(4, 3, 16, 16), model.draw_gates(4)
    saved = []
    results = []
    for model.recompute in (False, True):
        kept = {}

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            results.append(gradients(model, images, gates))
        saved.append(sum(kept.values()))
    torch.testing.assert_close(results[0], results[1], atol=0, rtol=0)
    assert method == "linear" or saved[1] < saved[0]


# every part at least once; what is not here is a sum of these
@pytest.mark.parametrize("method", ["full", "mlp3", "vpt-deep", "lora-stochastic", "adaptformer", "puma"])
def test_every_method_compiles(method):
    torch.compiler.reset()
    model = tiny(method).train()
    images, gates = torch.randn(4, 3, 16, 16), model.draw_gates(4)
    expected = gradients(model, images, gates)
    model.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(model, images, gates), expected)


@pytest.mark.parametrize("build", [lambda: tiny("puma"), lambda: tiny("puma+lora-stochastic"), lambda: tiny("full"),
                                   lambda: models.build("puma", *["deit_tiny_distilled_patch16_224", 8], pretrained=False, image_size=16)])  # fmt: skip
def test_the_evaluation_graph_exports(build):
    model, images = build().eval(), torch.randn(2, 3, 16, 16)
    exported = torch.export.export(model, (images,)).module()
    torch.testing.assert_close(exported(images), model(images), atol=1e-5, rtol=0)


def test_training_takes_both_options(tmp_path, monkeypatch):
    monkeypatch.setattr(EmbeddingModel, "compile", lambda self: torch.nn.Module.compile(self, backend="eager"))
    data = config.Data(datasets=("digits",), image_size=32)
    plain = config.Run(data=data, pretrained="random", dim=8, method=config.method("puma", prompts=2, adapter_rank=4),
                       training=config.Training(epochs=1, batch_size=60, device="cpu"))  # fmt: skip
    fast = replace(plain, training=replace(plain.training, compile=True, recompute=True))
    assert fast.identity("data", "weights") == plain.identity("data", "weights")
    states = [safetensors.torch.load_file(training.train(run, tmp_path / name) / "model.safetensors")
              for name, run in (("plain", plain), ("fast", fast))]  # fmt: skip
    torch.testing.assert_close(states[0], states[1], atol=1e-4, rtol=1e-3)
