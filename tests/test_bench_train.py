"""The training bench: its counts against torch's own counter, its references against the models, its file."""

import pandas as pd
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch.utils.flop_counter import FlopCounterMode

from pumalib import bench_train, config, paths
from pumalib.models import EmbeddingModel


def tiny(method, **settings):
    vit = VisionTransformer(img_size=32, patch_size=8, embed_dim=64, depth=3, num_heads=2, num_classes=0)
    return EmbeddingModel(vit, config.method(method, **settings), 8).train()


@pytest.mark.parametrize("method, settings", [
    *((name, {}) for name in ("full", "linear", "mlp3", "vpt", "vpt-deep", "lora", "adaptformer", "adapter", "prompt-pool", "vpt+adapter")),
    ("puma", {"adapter_keep": 1.0}), ("puma", {"adapter_keep": 1.0, "adapter_layers": 2}), ("puma+lora", {"adapter_keep": 1.0}),
])  # fmt: skip
def test_counts_are_what_a_step_computes(method, settings):
    model, images = tiny(method, **settings), torch.randn(4, 3, 32, 32)
    measured = []
    with FlopCounterMode(display=False) as counter:
        embeddings = model(images)
        measured.append(counter.get_total_flops())
        embeddings.square().sum().backward()
        measured.append(counter.get_total_flops() - measured[0])
    assert measured == [4 * count for count in bench_train.count_flops(model)]


def test_half_open_adapters_need_half_of_their_work():
    model, images = tiny("puma"), torch.randn(4, 3, 32, 32)
    gates = {"adapter": torch.tensor([2.0, 0, 0, 2]).expand(3, 2, 4)}
    with FlopCounterMode(display=False) as counter:
        model(images, gates).square().sum().backward()
    assert counter.get_total_flops() == 4 * sum(bench_train.count_flops(model))


def test_references_compute_what_the_models_compute():
    torch.manual_seed(0)
    images = torch.randn(4, 3, 32, 32)
    model = tiny("puma")
    for name, parameter in model.named_parameters():
        if ".up." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    gates = model.draw_gates(4)
    torch.testing.assert_close(bench_train.NaivePuma(model)(images, gates), model(images, gates))
    full = tiny("full")
    torch.testing.assert_close(bench_train.PlainTimm(full)(images, {}), full(images, {}))


def test_memory_on_a_cpu_counts_what_stands_and_what_a_step_keeps():
    sizes = dict(backbone="mini_vit", size=32, classes=20, device=torch.device("cpu"), compiled=False)
    images, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 3])
    peaks = {}
    for name in ("full", "linear"):
        c = bench_train.candidate(name, **sizes)
        bench_train.step(c, images, labels, torch.float32, lambda: None)
        peaks[name] = bench_train.peak_memory(c, images, labels, torch.float32)
        total = sum(p.numel() for p in (*c.model.parameters(), *c.loss.parameters()))
        trained = sum(p.numel() for g in c.optimiser.param_groups for p in g["params"])
        assert peaks[name] > 4 * (total + 3 * trained)  # parameters; gradients and AdamW's two moments
        if name == "linear":
            assert peaks[name] < 4 * (total + 3 * trained) + 50_000  # a frozen backbone keeps no activations
    assert peaks["full"] > 3 * peaks["linear"]


def test_quick_bench_writes_its_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    table = pd.read_csv(bench_train.main(["--quick", "--device", "cpu"]))
    assert list(table.columns) == bench_train.COLUMNS
    assert list(table["method"]) == [*bench_train.REFERENCES, *bench_train.METHODS]
    parts = table[[f"{part}_ms" for part in bench_train.PARTS]].sum(axis=1)
    assert (abs(parts - table["step_ms"]) < 0.01 * table["step_ms"]).all()  # the parts of one step
    rows = table.set_index("method")
    assert rows.at["vpt", "allowed_vs_vpt"] == 1 and rows.at["linear", "allowed_vs_vpt"] > 1 > rows.at["full", "allowed_vs_vpt"]
    assert rows.at["timm", "gflop_per_image"] > rows.at["full", "gflop_per_image"]
    printed = capsys.readouterr().out
    assert "PUMA's throughput beside vpt's" in printed and "extrapolated" in printed


def test_bars_of_a_gpu_are_judged_by_the_table():
    row = dict.fromkeys(bench_train.COLUMNS, 0) | {"device": "NVIDIA"}
    table = pd.DataFrame([
        row | {"method": "full", "images_per_s": 1000.0, "peak_mb": 1000.0},
        row | {"method": "puma", "images_per_s": 1160.0, "peak_mb": 810.0, "share_of_peak": 0.4},
    ])  # fmt: skip
    assert [holds for _, _, holds in bench_train.bars(table)] == [True, False, True]
