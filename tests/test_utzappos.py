"""UT-Zappos end to end: the real pair lists and the true layout with drawn shoes.

From --data-root to the table. Each phase has one image of each of its pairs: 83 + 30 + 36.
tests/data/utzappos holds the published lists.
"""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from lab import features
from lab.answers import load_run, predict_images
from lab.files import read_rows
from toy import command, metrics_of

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


def draw(path, state, object_):
    """A slice of a disc on white, as large as UT-Zappos' photos.

    Its state colours it, its object opens it.
    """
    image = Image.new("RGB", (136, 102), "white")
    colour = f"hsv({360 * STATES.index(state) // len(STATES)}, 100%, 80%)"
    ImageDraw.Draw(image).pieslice((23, 6, 113, 96), 0, 30 * (OBJECTS.index(object_) + 1), colour)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A --data-root as people have it: ut-zap50k/ and w2v/."""
    root = tmp_path_factory.mktemp("data")
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
            draw(root / "ut-zap50k/images" / image, state, object_)
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
    command("--dataset", "utzappos", "--data-root", root, "--weights", weights, "--device", "cpu",
            "--out", out, *options)


@pytest.fixture(scope="module")
def run(root, weights, tmp_path_factory):
    """The folder of the first run; so few images take larger steps, and a smaller model."""
    out = tmp_path_factory.mktemp("run")
    train(root, weights, out, "--epochs", 40, "--lr", 3e-4, "--batch-size", 16, "--hidden", 256)
    return out


def test_candidates(run):
    """83 + 15, 83 + 18 and 16 * 12; what is answered in the closed world is in it."""
    metrics = metrics_of(run)
    counts = metrics["candidates"]
    assert (counts["val"]["closed"], counts["test"]["closed"]) == (98, 101)
    assert counts["val"]["open"] == counts["test"]["open"] == 192
    assert 83 <= counts["test"]["open_masked"] <= 192
    closed_world = {" ".join(pair) for pair in PAIRS["train"] + PAIRS["test"]}
    rows = read_rows(run / "predictions.csv")
    assert {f"{row['closed_state']} {row['closed_object']}" for row in rows} <= closed_world
    exact = metrics["test"]["closed"]["exact"]
    assert exact["best_seen"] > 0.1 and exact["best_unseen"] > 0.2  # by chance: 1 of 83, 1 of 18


def test_published_settings_and_cached_features(run, root, weights, tmp_path, monkeypatch):
    """The second run, with the defaults: no image is opened; its settings are the published."""
    with np.load(root / "ut-zap50k/features.npz") as stored:
        assert stored["features"].shape == (149, 512) and len(set(stored["files"])) == 149
    monkeypatch.setattr(Image, "open", lambda path, *rest: pytest.fail(f"{path} is opened again"))
    train(root, weights, tmp_path, "--epochs", 2)
    settings = metrics_of(tmp_path)["settings"]
    digits = hashlib.sha256(weights.read_bytes()).hexdigest()[:8]
    expected = dict(backbone=f"ResNet-18 (weights {digits}), 224 of 256 pixels, frozen",
                    vectors=["word2vec"], recipe="paper", scale=50, margin=1, epochs=2)
    assert {name: settings[name] for name in expected} == expected
    # Two steps of 5e-5 after it began as this mean:
    fur = load_run(tmp_path).states[STATES.index("Faux.Fur")].numpy(force=True)
    np.testing.assert_allclose(fur, (VECTORS["fake"] + VECTORS["fur"]) / 2, atol=1e-3)


def test_predict(run, root, weights):
    """Of image files, decoded anew: the answers that the run gave for them from cached features."""
    rows = read_rows(run / "predictions.csv")[::12]
    images = [root / "ut-zap50k/images" / row["image"] for row in rows]
    answers = predict_images(load_run(run), images, weights=weights, device="cpu",
                             candidates="open", top=1)
    for row, answer in zip(rows, answers, strict=True):
        pair = answer["state"], answer["object"]
        assert pair == (row["open_state"], row["open_object"])
        assert answer["seen"] == (pair in PAIRS["train"])
