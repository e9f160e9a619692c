"""UT-Zappos end to end: the real pair lists and the true layout with drawn shoes.

From --data-root to the table. Each phase has one image of each of its pairs: 83 + 30 + 36.
tests/data/utzappos holds the published lists.
"""

import colorsys
import contextlib
import hashlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

import compcos
from lab import features
from lab.files import read_rows

LISTS = Path(__file__).parent / "data/utzappos"
PAIRS = {}
for phase in ("train", "val", "test"):
    lines = (LISTS / f"{phase}_pairs.txt").read_text().splitlines()
    PAIRS[phase] = [tuple(line.split()) for line in lines]
STATES = sorted({state for pairs in PAIRS.values() for state, _ in pairs})
OBJECTS = sorted({object_ for pairs in PAIRS.values() for _, object_ in pairs})
WORDS = """canvas cotton fake fur leather thick hair nubuck nylon shiny rubber satin sheepskin suede
           synthetic wool ankle boots knee high midcalf sandals boat shoes clogs flats heels loafers
           oxford sneakers slippers""".split()
VECTORS = dict(zip(WORDS, np.random.default_rng(1).standard_normal((len(WORDS), 300), np.float32)))


def draw(path, state, object_, rng):
    """A slice of a disc on white, as large as UT-Zappos' photos, with noise.

    Its state colours it, its object opens it.
    """
    image = Image.new("RGB", (136, 102), "white")
    parts = colorsys.hsv_to_rgb(STATES.index(state) / len(STATES), 1, 0.8)
    colour = tuple(int(255 * part) for part in parts)
    ImageDraw.Draw(image).pieslice((23, 6, 113, 96), 0, 30 * (OBJECTS.index(object_) + 1), colour)
    noisy = np.asarray(image) + rng.normal(0, 10, (102, 136, 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A --data-root as people have it: ut-zap50k/ and w2v/."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    rows = []
    split = root / "ut-zap50k/compositional-split-natural"
    split.mkdir(parents=True)
    for phase, pairs in PAIRS.items():
        (split / f"{phase}_pairs.txt").write_bytes((LISTS / f"{phase}_pairs.txt").read_bytes())
        for state, object_ in pairs:
            file = f"{7000000 + len(rows)}.{len(rows) % 10}.jpg"
            image = f"{state}_{object_}/{file}"
            inside = f"Shoes/{object_}/Brand/{file}"
            rows.append(dict(image=image, _image=inside, attr=state, obj=object_, set=phase))
            draw(root / "ut-zap50k/images" / image, state, object_, rng)
    rows[5:5] = [
        dict(rows[5], image="NA_NA/1.jpg", attr="NA", obj="NA"),
        dict(rows[5], image="2.jpg", set="NA"),
    ]
    torch.save(rows, root / "ut-zap50k/metadata_compositional-split-natural.t7")
    (root / "w2v").mkdir()
    with open(root / "w2v/GoogleNews-vectors-negative300.bin", "wb") as file:
        file.write(f"{len(VECTORS)} 300\n".encode())
        for word, vector in VECTORS.items():
            file.write(word.encode() + b" " + vector.astype("<f4").tobytes())
    return root


@pytest.fixture(scope="module", autouse=True)
def small_photos():
    """The network sees every fourth pixel each way, for a sixteenth of its time.

    That its features of whole pictures are right is test_features.py's.
    """
    load_backbone = features.load_backbone

    def load_smaller(weights=None):
        network = load_backbone(weights)
        return lambda batch: network(batch[:, :, ::4, ::4])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "load_backbone", load_smaller)
        yield


def train(root, weights, out, *options):
    """What the command prints."""
    arguments = ["--dataset", "utzappos", "--data-root", str(root), "--weights", str(weights)]
    arguments += ["--device", "cpu", "--out", str(out)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        compcos.main([*arguments, *options])
    return printed.getvalue()


@pytest.fixture(scope="module")
def run(root, weights, tmp_path_factory):
    """The first run: the folder it filled and what it printed.

    So few images take larger steps, and a smaller model.
    """
    out = tmp_path_factory.mktemp("run")
    printed = train(root, weights, out, "--epochs", "40", "--lr", "3e-4", "--batch-size", "16",
                    "--hidden", "256")
    return out, printed


def metrics_of(out):
    return json.loads((out / "metrics.json").read_text(encoding="utf-8"))


def test_candidates(run):
    """83 + 15, 83 + 18 and 16 * 12; what is answered in the closed world is in it."""
    counts = metrics_of(run[0])["candidates"]
    assert (counts["val"]["closed"], counts["test"]["closed"]) == (98, 101)
    assert counts["val"]["open"] == counts["test"]["open"] == 192
    assert 83 <= counts["test"]["open_masked"] <= 192
    closed_world = {" ".join(pair) for pair in PAIRS["train"] + PAIRS["test"]}
    assert {row["closed"] for row in read_rows(run[0] / "predictions.csv")} <= closed_world


def test_table(run):
    """Its rows are what metrics.json holds."""
    out, printed = run
    metrics = metrics_of(out)
    start = printed.index("utzappos, compcos, open world, seed 0 (test, %)")
    swept = ("best_seen", "best_unseen", "best_hm", "auc", "state_accuracy", "object_accuracy")
    for line in printed[start:].splitlines()[3:12]:
        name, protocol, *shown = line.split()
        if protocol != "fixed_bias":
            report = metrics["test"][name][protocol]
            assert shown == [f"{100 * report[key]:.1f}" for key in swept]
    exact = metrics["test"]["closed"]["exact"]
    assert exact["best_seen"] > 0.1 and exact["best_unseen"] > 0.2  # by chance: 1 of 83, 1 of 18


def test_published_settings_and_cached_features(run, root, weights, tmp_path, monkeypatch):
    """The second run, with the defaults: no image is opened; its settings are the published."""
    cache = root / "ut-zap50k/features.npz"
    with np.load(cache) as stored:
        assert stored["features"].shape == (149, 512) and len(set(stored["files"])) == 149
    before = cache.stat().st_mtime_ns
    monkeypatch.setattr(Image, "open", lambda path, *rest: pytest.fail(f"{path} is opened again"))
    train(root, weights, tmp_path, "--epochs", "2")
    assert cache.stat().st_mtime_ns == before
    settings = metrics_of(tmp_path)["settings"]
    digits = hashlib.sha256(weights.read_bytes()).hexdigest()[:8]
    expected = dict(backbone=f"ResNet-18 (weights {digits}), 224 of 256 pixels, frozen",
                    vectors=["word2vec"], recipe="paper", scale=50, margin=1, epochs=2)
    assert {name: settings[name] for name in expected} == expected
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    assert best["states"] == STATES and best["objects"] == OBJECTS
    # Two steps of 5e-5 after it began as this mean:
    fur = best["weights"]["states"][STATES.index("Faux.Fur")]
    np.testing.assert_allclose(fur, (VECTORS["fake"] + VECTORS["fur"]) / 2, atol=1e-3)


def test_predict(run, root, weights, capsys):
    """Of image files, decoded anew: the answers that the run gave for them from cached features."""
    rows = read_rows(run[0] / "predictions.csv")[::12]
    images = [str(root / "ut-zap50k/images" / row["image"]) for row in rows]
    arguments = ["--checkpoint", str(run[0] / "best.pt"), "--predict", *images]
    arguments += ["--weights", str(weights), "--device", "cpu"]
    compcos.main([*arguments, "--candidates", "open", "--top", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1::4] == images and len(lines) == 13
    bias = metrics_of(run[0])["bias"]["open"]
    for row, line in zip(rows, lines[2::4]):
        score, _, state, object_, kind = line.split()  # score, probability, names
        assert f"{state} {object_}" == row["open"]
        is_seen = (state, object_) in PAIRS["train"]
        assert kind == ("(seen)" if is_seen else "(unseen)")
        expected = float(row["open_score"]) + (0 if is_seen else bias)
        assert float(score) == pytest.approx(expected, abs=2e-3)
