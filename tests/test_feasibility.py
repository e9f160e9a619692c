"""Tests of feasibility.py: the definition written out, the golden file, closed forms, the published
scores."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import feasibility as F

HERE = Path(__file__).parent
SHARED = HERE / "../../shared/data"

STATES, OBJECTS = ["old", "small", "wet"], ["cat", "dog", "well"]
STATE_VECTORS = np.array([[1, 0.5, 0], [1, 0, 0], [3, 4, 0]])
OBJECT_VECTORS = np.array([[4, 3, 0], [2, 0, 0], [0, 0, 1]])
SEEN = np.array([[0, 0, 1], [1, 0, 0], [0, 1, 1]], bool)  # old well, small cat, wet dog, wet well


# ---- scores ----


def plain(states, objects, seen, mix):
    """Return the scores of Eq. 3 to 5 word for word."""

    def cos(a, b):
        return a @ b / np.sqrt((a @ a) * (b @ b))

    scores = np.ones(seen.shape)
    for s, o in np.argwhere(~seen):
        others = np.flatnonzero(seen[s])
        by_object = max([cos(objects[o], objects[other]) for other in others], default=-1)
        others = np.flatnonzero(seen[:, o])
        by_state = max([cos(states[s], states[other]) for other in others], default=-1)
        g = {"mean": (by_state + by_object) / 2, "max": max(by_state, by_object),
             "state": by_state, "object": by_object}
        scores[s, o] = g[mix]
    return scores


def random_case(seed, density):
    rng = np.random.default_rng(seed)
    S, O, D = rng.integers(1, 9, 3)
    seen = rng.random((S, O)) < density
    seen[rng.integers(S), rng.integers(O)] = True
    return rng.normal(size=(S, D)), rng.normal(size=(O, D)), seen


@pytest.mark.parametrize("density", [0, 0.1, 0.4, 0.9, 1])  # one seen, empty rows, ..., all seen
@pytest.mark.parametrize("mix", ["mean", "max", "state", "object"])
def test_scores_equal_the_plain_double_loop(density, mix):
    for seed in range(20):
        case = random_case(seed, density)
        scores = F.feasibility_scores(*case, mix=mix)
        np.testing.assert_allclose(scores, plain(*case, mix), atol=1e-12)


def test_scores_equal_the_published_models():
    golden = np.load(HERE / "data/model.npz")
    vectors = (golden[f"param/{kind}_embedder.weight"] for kind in ("attr", "obj"))
    scores = F.feasibility_scores(*vectors, golden["seen"])
    np.testing.assert_allclose(scores, golden["feasibility"], atol=1e-6)


@pytest.mark.parametrize("dtype, factor, tolerance", [
    ("float16", 7, 5e-3), ("float64", 8e307, 1e-12), ("float64", 1e-310, 1e-12),
    ("float64", 1e-320, 5e-3)])  # below 2e-308 with fewer digits
def test_scores_take_any_floats_and_lengths_and_change_no_input(dtype, factor, tolerance):
    states, objects, seen = random_case(3, 0.4)
    expected = F.feasibility_scores(states, objects, seen)
    given = objects.astype(dtype) * factor
    before = given.copy()
    scores = F.feasibility_scores(states.astype(dtype), given, seen)
    np.testing.assert_allclose(scores, expected, atol=tolerance)
    assert scores.dtype == np.float64 and np.array_equal(given, before)


def test_scores_stay_in_their_range():
    vectors = np.random.default_rng(0).normal(size=(60, 7))
    vectors = np.concatenate([vectors, vectors / 3, -vectors])  # parallel ones, and opposed ones
    scores = F.feasibility_scores(vectors, vectors, np.eye(180, dtype=bool))
    assert scores.max() == 1 and scores.min() == -1


def test_torch_tensors_are_as_good_as_arrays():
    torch = pytest.importorskip("torch")
    states, objects, seen = random_case(0, 0.3)
    tensors = (torch.from_numpy(states).requires_grad_(), torch.from_numpy(objects))
    scores = F.feasibility_scores(*tensors, torch.from_numpy(seen))
    assert np.array_equal(scores, F.feasibility_scores(states, objects, seen))


def test_explanations_list_all_supporting_compositions_and_account_for_the_score():
    for seed in range(5):
        states, objects, seen = random_case(seed, 0.4)
        for s, o in np.ndindex(seen.shape):
            others = seen.copy()
            others[s, o] = False
            by_object, by_state = F.explain(s, o, states, objects, seen)
            assert sorted(row[1] for row in by_object) == np.flatnonzero(others[s]).tolist()
            assert sorted(row[0] for row in by_state) == np.flatnonzero(others[:, o]).tolist()
            for rows, mix in ((by_object, "object"), (by_state, "state")):
                cosines = [cosine for _, _, cosine in rows]
                assert cosines == sorted(cosines, reverse=True)
                expected = plain(states, objects, others, mix)[s, o]
                assert max(cosines, default=-1) == pytest.approx(expected)


# ---- rankings, masks, mixtures, figures ----


def test_ranking_by_hand():
    scores = np.array([[0.1, 0.9, 1, 0.5], [0.2, 0.2, 0.3, 0.2]])
    ranking = F.ranked(scores, scores == 1, top=2)
    for ends, expected in (
            (ranking.states[1], ([2, 0], [0, 1])), (ranking.objects[2], ([1], [1])),
            (ranking.overall, ([1, 3], [0, 4]))):
        assert (ends[0].tolist(), ends[1].tolist()) == expected


def test_masks_keep_the_seen_and_split_the_unseen():
    scores = np.array([[0.1, 0.4], [0.3, -0.5]])
    seen = np.array([[False, False], [False, True]])
    upper = np.array([[False, True], [True, True]])  # from the median of the unseen, 0.3
    assert np.array_equal(F.hard_mask(scores, seen, 0.3), upper)
    assert np.array_equal(F.median_mask(scores, seen), upper)
    assert np.array_equal(F.median_mask(scores, seen, inverse=True), seen | ~upper)
    assert F.median_mask(scores, seen | True).all()
    # What float32 makes of 0.7 lies below it, and of 0.1 above, whatever is compared in float32.
    mask = F.hard_mask(np.array([[0.7, 0.1]], "float32"), np.zeros((1, 2), bool), 0.7)
    assert mask.tolist() == [[False, False]]


def test_conformal_threshold_is_an_order_statistic():
    assert F.conformal_threshold(-np.arange(38)) == -37  # the smallest
    assert F.conformal_threshold(np.arange(18)) == -np.inf


def test_combination_is_convex_and_passes_over_what_is_unknown():
    mixed = F.blend(np.array([[0.2, 0.4]]), np.array([[-1, np.nan]]), weight=0.25)
    np.testing.assert_allclose(mixed, [[0.75 * 0.2 - 0.25, 0.4]])


def test_auroc_counts_pairs_with_ties_half():
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores = rng.integers(0, 6, (4, 5)) / 6
        positive, among = rng.random((2, 4, 5)) < 0.6
        ours = scores[positive & among][:, None]
        theirs = scores[~positive & among]
        pairs = (ours > theirs) + (ours == theirs) / 2
        assert F.auroc(scores, positive, among) == pytest.approx(pairs.mean())
    assert np.isnan(F.auroc(scores, among, among))


HALF = np.full((3, 3), 0.5)
VECTORS = STATE_VECTORS, OBJECT_VECTORS, SEEN


@pytest.mark.parametrize("function, arguments, message", [
    (F.feasibility_scores, (STATE_VECTORS * 0, OBJECT_VECTORS, SEEN), "state_vectors: row 0"),
    (F.feasibility_scores, (STATE_VECTORS, HALF * np.inf, SEEN), r"first at \[0, 0\]"),
    (F.feasibility_scores, (STATE_VECTORS, OBJECT_VECTORS, SEEN[1:]), r"seen is bool \(2, 3\)"),
    (F.feasibility_scores, (STATE_VECTORS, OBJECT_VECTORS, SEEN & ~SEEN), "seen has no True"),
    (partial(F.feasibility_scores, mix=["mean"]), VECTORS, "mix must be one of mean, max, state, "),
    (F.explain, (-1, 0, *VECTORS), "state must be one of the whole numbers from 0 to 2, got -1"),
    (F.explain, ("wet", 0, *VECTORS), "state must be .* got 'wet'"),
    (F.hard_mask, (HALF, SEEN, np.nan), "threshold must be one of the numbers from -inf to inf"),
    (partial(F.blend, weight=0.5), (HALF, 3 * HALF), r"external must be in \[-1, 1\]"),
])
def test_bad_input_is_named(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)


def test_a_further_mix_is_one_entry_whose_result_is_checked(monkeypatch):
    monkeypatch.setitem(F.MIXES, "mine", lambda of_state, of_object: (of_state + of_object) / 2)
    assert np.array_equal(F.feasibility_scores(*VECTORS, mix="mine"),
                          F.feasibility_scores(*VECTORS))
    monkeypatch.setitem(F.MIXES, "mine", lambda *_: HALF * np.nan)
    with pytest.raises(ValueError, match="the result of mix 'mine' "):
        F.feasibility_scores(*VECTORS, mix="mine")


# ---- real data: the published figures ----


def test_figures_of_mit_states():
    data = np.load(HERE / "data/feasibility_mitstates.npz")
    for mix, expected in {"mean": 0.934, "max": 0.855, "state": 0.661, "object": 0.752}.items():
        scores = F.feasibility_scores(data["state_vectors"], data["object_vectors"], data["seen"],
                                      mix=mix)
        unseen = ~data["seen"]
        ranks = [values[unseen].argsort().argsort() for values in (scores, data["published"])]
        correlation = np.corrcoef(ranks)[0, 1]  # Spearman's; hardly any scores are equal
        assert correlation == pytest.approx(expected, abs=0.005)
        if mix == "mean":
            value = F.auroc(scores, data["occurring"], unseen)
            assert value == pytest.approx(0.833, abs=0.005)


@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared")
def test_script_gets_the_figures_of_cgqa(capsys):
    folder = SHARED / "splits/cgqa"
    F.main(["--pairs", f"{folder}/train_pairs.txt",
            "--vectors", f"{SHARED}/words/glove.100d.subset.txt",
            "--occur", f"{folder}/val_pairs.txt", f"{folder}/test_pairs.txt"])
    assert capsys.readouterr().out.splitlines() == [
        "AUROC: 0.93",
        "AUROC of vectors shuffled 10 times, mean ± standard deviation: 0.808 ± 0.0073"]


# ---- files ----


@pytest.mark.parametrize("text, expected", [
    ("wet dog\n  small   dog \n\nwet dog", [("wet", "dog"), ("small", "dog"), ("wet", "dog")]),
    ("\ufeffOff White\train coat\nwet\tdog\n", [("Off White", "rain coat"), ("wet", "dog")]),
    ("Off White, rain  coat\r\n\r\nwet dog\r\n", [("Off White", "rain coat"), ("wet", "dog")]),
    ('state;object\n"Off White";"rain coat"\n', [("Off White", "rain coat")]),
    ("attr obj\nstate object\n", [("state", "object")]),
])
def test_pair_lists(text, expected, tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_bytes(text.encode())
    assert F.read_pairs(path) == expected


@pytest.mark.parametrize("content, message", [
    (b"state object\n", "pairs.txt contains no pairs"),
    (b"wet dog\nwet old dog\n", "pairs.txt, line 2: .*got 'wet old dog'"),
    (b"wet\tdog\n\n\tdog\n", "pairs.txt, line 3"),
    ("wet café".encode("latin-1"), "line 1: .*UTF-8"),
])
def test_bad_pair_lists_are_named(content, message, tmp_path):
    (tmp_path / "pairs.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        F.read_pairs(tmp_path / "pairs.txt")


# ---- the script ----


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with lists of pairs and vectors of both kinds, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    names = STATES + OBJECTS
    vectors = np.concatenate([STATE_VECTORS, OBJECT_VECTORS])
    lines = [f"{name} {' '.join(map(str, row))}" for name, row in zip(names, vectors)]
    Path("vectors.txt").write_text("\n".join(lines))
    np.savez("vectors.npz", names=names, vectors=vectors)
    Path("pairs.txt").write_text("old well\nsmall cat\nwet dog\nwet well\n")
    Path("occur.txt").write_text("wet cat\nsmall dog\nwet dog\n")
    return tmp_path


OPTIONS = ["--pairs", "pairs.txt", "--vectors", "vectors.npz"]


def run(capsys, *more):
    F.main([*OPTIONS, *more])
    return capsys.readouterr().out


def test_script_prints_the_tables(files, capsys):
    out = run(capsys, "--top", "1")
    assert out == run(capsys, "--top", "1", "--vectors", "vectors.txt")
    assert out.count("| most feasible |") == 3
    assert "| all | small dog 0.70 | " in out
    assert "| cat | wet 0.70, old 0.45 |  |" in run(capsys)
    assert "| cat | wet 0.70 | old 0.45 |" in out  # wet: (0.6 + 0.8) / 2; old: (2 / √5 + 0) / 2


def test_script_explains(files, capsys):
    assert run(capsys, "--explain", "wet", "cat", "--top", "1").splitlines() == [
        "wet cat: feasibility 0.70",
        "state term, cosines of seen compositions: small cat 0.60",
        "object term, cosines of seen compositions: wet dog 0.80",
    ]
    assert "1.00, seen\n" in run(capsys, "--explain", "small", "cat")


def test_script_writes_csv(files, capsys):
    run(capsys, "--csv", "out.csv", "--mix", "max")
    lines = Path("out.csv").read_text().splitlines()
    assert lines[:4] == [  # old is like small and wet by 2 / √5
        "state,object,seen,feasibility",
        "old,cat,0,0.894427",
        "old,dog,0,0.894427",
        "old,well,1,1.000000",
    ]


@pytest.mark.parametrize("arguments, message", [
    (["--top", "0"], "top must be one of the whole numbers"),
    (["--explain", "wet", "zebra"], "pairs.txt lacks zebra"),
    (["--occur", "pairs.txt"], "--occur must list some of the unseen"),
    (["--vectors", "pairs.npz"], "pairs.npz cannot be read: expected an .npz file"),
    (["--vectors", "short.npz"], "short.npz: vectors is float64 (2, 3)"),
])
def test_script_says_what_is_wrong_in_one_line(files, capsys, arguments, message):
    Path("pairs.npz").write_text("wet cat\n")
    np.savez("short.npz", names=STATES + OBJECTS, vectors=np.zeros((2, 3)))
    with pytest.raises(SystemExit) as stop:
        run(capsys, *arguments)
    out, error = capsys.readouterr()
    assert stop.value.code == 2 and not out
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


def start(script, *more, **streams):
    command = [sys.executable, script, *OPTIONS, *more]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **streams)


def test_copied_file_works_alone(files):
    Path("feasibility.py").write_bytes(Path(F.__file__).read_bytes())
    Path("lab.py").write_text("raise SystemExit('foreign')\n")
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    out, error = start("feasibility.py", "--occur", "occur.txt", stdout=subprocess.PIPE,
                       env=ascii_only).communicate()
    assert "AUROC: 1\n" in out and r" \xb1 " in out and not error
    _, error = start("feasibility.py", "--vectors", "vectors.txt").communicate()
    assert error.startswith("error: vectors.txt is not an .npz")


@pytest.mark.skipif(os.name != "posix", reason="pipes of Unix")
def test_pipes_and_closed_streams_end_it_quietly(files):
    reader, writer = os.pipe()
    os.close(reader)
    assert start(F.__file__, stdout=writer).communicate()[1] == ""
    os.close(writer)
    closed = start(F.__file__, preexec_fn=lambda: os.close(1))
    assert closed.communicate()[1] == "" and closed.returncode == 0
