"""Recipes and members from the command line: lengths in steps, resuming, loading, predicting;
changing the project."""

import csv
import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import baselines
import compcos
import data
import evaluate
import experiment
import reproduce
from compcos import CompCos, Members, predict, predict_images
from test_experiment import toy  # noqa: F401, a fixture

README = Path(__file__).parent.parent / "README.md"


def run(folder, out, *options):
    """A short strong run on the CPU; its metrics."""
    compcos.main(
        ["--dataset", str(folder), "--out", str(out), "--device", "cpu", *map(str, options)]
    )
    return json.loads((out / "metrics.json").read_text())


def without_settings(metrics):
    """What two runs of the same numbers share."""
    return {key: value for key, value in metrics.items() if key not in ("settings", "versions")}


def test_a_folder_gets_the_strong_recipe(toy, tmp_path, capsys):  # noqa: F811
    metrics = run(toy, tmp_path / "run", "--epochs", 2, "--warmup", 1, "--members", 2)
    settings = metrics["settings"]
    assert settings["recipe"] == "strong" and settings["members"] == 2
    assert settings["lr"] == 5e-4 and settings["dim"] == 300 and not settings["unit_images"]
    assert "strong recipe, 2 members" in capsys.readouterr().out
    published = run(toy, tmp_path / "published", "--epochs", 2, "--recipe", "published")["settings"]
    assert published["recipe"] == "published" and published["members"] == 1


def test_a_dataset_with_a_setting_that_is_none(monkeypatch):
    monkeypatch.setitem(compcos.OF_DATASET, "birds", dict(scal=50.0, epochs=100))
    with pytest.raises(ValueError, match=r"OF_DATASET\['birds'\] sets scal: expected .*scale"):
        compcos.defaults()


@pytest.mark.parametrize("images, passes, steps_an_epoch", [
    (460, 6, 22), (8000, 1, 63), (30000, 1, 235), (60, 20, 20)])
def test_lengths_are_counted_in_steps(images, passes, steps_an_epoch):
    chosen = dict(compcos.STRONG)
    experiment.steps_to_epochs(chosen, images)
    steps = chosen["epochs"] * steps_an_epoch
    assert chosen["passes"] == passes
    assert steps >= 2600 and (steps < 2600 + steps_an_epoch or chosen["epochs"] == 40)
    assert abs(chosen["warmup"] * steps_an_epoch - 980) <= steps_an_epoch / 2
    given = compcos.STRONG | dict(epochs=7)
    experiment.steps_to_epochs(given, images)
    assert given["epochs"] == 7 and given["patience"] is None
    assert (given["passes"], given["warmup"]) == (passes, chosen["warmup"])  # epochs are as long


def test_members_resumed_equal_uninterrupted(toy, tmp_path):  # noqa: F811
    """Two members, one epoch and one more, against two at once: metrics and weights alike."""
    options = ["--members", 2, "--warmup", 2]
    whole = run(toy, tmp_path / "whole", "--epochs", 2, *options)
    run(toy, tmp_path / "part", "--epochs", 1, *options)
    part = run(toy, tmp_path / "part", "--epochs", 2, "--resume", *options)
    assert without_settings(part) == without_settings(whole)
    weights = [CompCos.load(tmp_path / name / "best.pt").state_dict() for name in ("whole", "part")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_members_live_in_one_file(toy, tmp_path):  # noqa: F811
    """best.pt of three members loads, scores as their mean, predicts, and gives the feasibility
    that was reported."""
    run(toy, tmp_path / "run", "--epochs", 2, "--members", 3, "--save-scores")
    model = CompCos.load(tmp_path / "run/best.pt")
    assert isinstance(model, Members) and len(model.members) == 3
    dataset = data.load(str(toy))
    stored = data.read_features(toy / "features.npz")
    rows = {name: row for name, row in zip(stored["files"], stored["features"])}
    features = np.stack([rows[name] for name in dataset.images["test"]])
    scores = model(torch.as_tensor(features)).detach().flatten(1).numpy()
    np.testing.assert_allclose(scores, np.load(tmp_path / "run/scores.npy"), atol=1e-5)
    np.testing.assert_allclose(
        model.feasibility(dataset.seen), model.checkpoint["feasibility"], atol=1e-6
    )
    assert (predict(model, features, k=1)[0][:, 0] == scores.argmax(1)).all()


def assert_scores_as_saved(toy, folder):  # noqa: F811
    """The best.pt of a run scores the first test image as --save-scores has kept it."""
    model = CompCos.load(folder / "best.pt")
    stored = data.read_features(toy / "features.npz")
    row = list(stored["files"]).index(data.load(str(toy)).images["test"][0])
    score = model(torch.as_tensor(stored["features"][[row]])).detach().numpy().ravel()
    np.testing.assert_allclose(score, np.load(folder / "scores.npy")[0], atol=1e-5)


class Learnt(compcos.TrainingLoss):
    """A loss with a number that is learnt."""

    def __init__(self, model, seen, **settings):
        super().__init__(model, seen, **settings)
        self.number = torch.nn.Parameter(torch.ones(()))

    def forward(self, model, features, target):
        return super().forward(model, features, target) + self.number**2


@pytest.mark.parametrize("members", [1, 2])
def test_what_an_own_loss_learns_is_trained_and_is_no_part_of_prediction(
        toy, tmp_path, monkeypatch, members):  # noqa: F811
    monkeypatch.setattr(compcos, "TrainingLoss", Learnt)
    run(toy, tmp_path / "run", "--epochs", 2, "--members", members, "--save-scores")
    weights = torch.load(tmp_path / "run/best.pt")["weights"]
    learnt = [float(value) for name, value in weights.items() if name.endswith("number")]
    assert len(learnt) == members and max(learnt) < 1
    monkeypatch.undo()
    assert_scores_as_saved(toy, tmp_path / "run")


def test_the_mask_never_hides_from_a_user_what_the_folder_names(toy, tmp_path):  # noqa: F811
    run(toy, tmp_path / "run", "--epochs", 1)
    model = CompCos.load(tmp_path / "run/best.pt")
    model.checkpoint["threshold"] = 2.0  # would hide every unseen composition
    dataset = data.load(str(toy))
    named = set(np.concatenate([dataset.targets[phase] for phase in data.PHASES]).tolist())
    allowed = compcos.allowed_answers(model.checkpoint)["open_masked"]
    assert named == set(np.flatnonzero(allowed).tolist())


def test_predictions_as_a_table(toy, tmp_path, capsys, monkeypatch):  # noqa: F811
    """Rows of --csv are those of predict_images; probabilities are the softmax over the candidates
    allowed."""
    run(toy, tmp_path / "run", "--epochs", 1, "--members", 2)
    file = toy / "features.npz"
    table = tmp_path / "answers.csv"
    best = torch.load(tmp_path / "run/best.pt")
    compcos.main(
        [
            "--checkpoint",
            str(tmp_path / "run/best.pt"),
            "--features",
            str(file),
            "--csv",
            str(table),
            "--candidates",
            "open",
            "--top",
            "30",
            "--device",
            "cpu",
        ]
    )
    with open(table, newline="") as opened:
        rows = list(csv.DictReader(opened))
    model = CompCos.load(tmp_path / "run/best.pt")
    stored = data.read_features(file)
    assert len(rows) == 30 * len(stored["files"])
    expected = predict_images(model, stored["files"], stored["features"], top=30, candidates="open")
    assert [row["object"] for row in rows] == [row["object"] for row in expected]
    ranked = model(torch.as_tensor(stored["features"][:1])).detach().flatten()
    ranked += best["bias"]["open"] * ~best["seen"].flatten()
    shares = (ranked / best["temperature"]["open"]).softmax(0).sort(descending=True).values
    found = [float(row["probability"]) for row in rows[:30]]  # best first
    np.testing.assert_allclose(found, shares, rtol=1e-4, atol=1e-7)
    for options, message in (
        (["--top", "0"], "--top is 0"),
        (["--predict", "nowhere.png"], "no features of"),
    ):
        with pytest.raises(SystemExit):
            compcos.main(
                ["--checkpoint", str(tmp_path / "run/best.pt"), "--features", str(file), *options]
            )
        assert message in capsys.readouterr().err

    empty = tmp_path / "empty.npz"
    np.savez(empty, files=np.zeros(0, str), features=stored["features"][:0])
    with pytest.raises(SystemExit):
        compcos.main(["--checkpoint", str(tmp_path / "run/best.pt"), "--features", str(empty)])
    assert f"{empty} holds features of no image" in capsys.readouterr().err

    # A disk that fills up: the file is named, the earlier table stays, and no part of the new one.
    before = sorted(path.name for path in tmp_path.iterdir())
    answers = table.read_bytes()
    write_bytes = Path.write_bytes

    def fill_up(path, contents):
        write_bytes(path, contents[:len(contents) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill_up)
    with pytest.raises(SystemExit) as stop:
        compcos.main(["--checkpoint", str(tmp_path / "run/best.pt"), "--features", str(file),
                      "--csv", str(table), "--top", "1"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert error.endswith(f"cannot write {table}: No space left on device\n")
    assert table.read_bytes() == answers
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def examples():
    """The blocks of README's "Change it", as it prints them: own loss, model, dataset."""
    section = README.read_text(encoding="utf-8").split("## Change it")[1].split("\n## ")[0]
    blocks = re.findall("```(?:python|text)\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        statements = [line for line in block.splitlines() if line and "import" not in line]
        assert len(statements) <= 15
    return blocks


@pytest.mark.parametrize("recipe", ["published", "strong"])
@pytest.mark.parametrize("world", ["open", "closed"])
def test_the_loss_of_readme_is_trained_by(toy, tmp_path, monkeypatch, recipe, world):  # noqa: F811
    options = ["--recipe", recipe, "--world", world, "--members", 1, "--epochs", 2, "--plain-loss"]
    before = run(toy, tmp_path / "before", *options)
    names = vars(compcos).copy()
    exec(examples()[0], names)
    monkeypatch.setattr(compcos, "image_losses", names["image_losses"])
    after = run(toy, tmp_path / "after", *options)
    logs = []
    for name in ("before", "after"):
        with open(tmp_path / name / "log.csv", newline="") as file:
            logs.append([float(row["loss"]) for row in csv.DictReader(file)])
    # (1 - p)² < 1, so each focal loss is below the cross-entropy
    assert 0 < logs[1][0] < logs[0][0]
    assert before["settings"]["plain_loss"] and after["test"] != before["test"]


def test_the_model_of_readme_runs(toy, tmp_path, monkeypatch, capsys):  # noqa: F811
    """Training, resuming, three candidate sets, files, and rows in the tables of reproduce.py."""
    monkeypatch.setattr(baselines, "MODELS", dict(apart=baselines.Apart))
    names = {}
    exec(examples()[1], names)
    assert baselines.MODELS["mine"] is names["Mine"]
    assert names["Mine"].__bases__ == (baselines.Compared,)
    common = ["--dataset", str(toy), "--device", "cpu", "--out"]
    for out, epochs, more in (("whole", 4, []), ("part", 2, []), ("part", 4, ["--resume"])):
        options = ["--model", "mine", "--epochs", str(epochs), *more]
        baselines.main([*common, str(tmp_path / out), *options])
    whole = json.loads((tmp_path / "whole/metrics.json").read_text())
    part = json.loads((tmp_path / "part/metrics.json").read_text())
    assert without_settings(part) == without_settings(whole)
    assert tuple(whole["test"]) == experiment.CANDIDATE_SETS
    files = {path.name for path in (tmp_path / "part").iterdir()}
    assert files >= {*experiment.RESULTS, "last.pt", "log.csv"}
    # best.pt holds what makes the model anew
    contents = experiment.load_best(tmp_path / "part/best.pt", "Mine")
    dataset = data.load(str(toy))
    vectors = torch.zeros(len(dataset.states), 5), torch.zeros(len(dataset.objects), 5)
    model = names["Mine"](*vectors, seen=dataset.seen, **contents["config"])
    weights = contents["weights"]
    model.states = torch.nn.Parameter(torch.empty_like(weights["states"]))
    model.objects = torch.nn.Parameter(torch.empty_like(weights["objects"]))
    model.load_state_dict(weights)

    out = tmp_path / "report"
    reproduce.main([*common, str(out), "--quick", "--seeds", "0", "--only", "table1", "masking",
                    "--mine", "--lr 1e-3"])
    report = json.loads((out / "report.json").read_text())
    assert "mine" in report["table1"]["open"] and "mine, mask" in report["masking"]
    run_of_mine = json.loads((out / "runs/mine/seed0/metrics.json").read_text())
    assert run_of_mine["settings"]["lr"] == 1e-3
    assert "| mine | exact |" in (out / "report.md").read_text()


def test_the_dataset_of_readme_runs(toy, tmp_path, monkeypatch):  # noqa: F811
    """A line in data.FOLDERS; one in compcos.OF_DATASET, of which the rest is as for MIT-States."""
    shutil.move(toy, tmp_path / "my-birds")
    monkeypatch.setattr(data, "FOLDERS", dict(data.FOLDERS))
    monkeypatch.setattr(compcos, "OF_DATASET", dict(compcos.OF_DATASET))
    named, settings = [eval("{%s\n}" % line) for line in examples()[2].splitlines()]
    data.FOLDERS.update(named)
    options = ["--data-root", tmp_path, "--epochs", 2]
    found = run("birds", tmp_path / "run", *options)["settings"]
    assert found["dataset"] == "birds" and found["recipe"] == "strong"
    compcos.OF_DATASET.update(settings)
    found = run("birds", tmp_path / "published", *options)["settings"]
    assert found["recipe"] == "published"
    assert (found["scale"], found["epochs"], found["margin"]) == (50.0, 2, 0.4)


BROKEN = {  # what is wrong with a model -> what is said of it, before any training
    "mean": r"Broken.loss gives \(\d+,\): expected a 0-dim tensor, the mean over the batch",
    "loss": "Broken has no loss: a model offers all of states, objects, loss",
    "config": "Broken has no config",
    "order": r"Broken.score gives \(2, \d+, \d+\) for 2 images: expected \(B, S, O\)",
    "feasibility": r"Broken.feasibility gives \(3,\): expected \(S, O\)",
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_model_that_breaks_the_contract_is_told_before_training(
        toy, tmp_path, what, monkeypatch, capsys):  # noqa: F811
    class Broken(baselines.Apart):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            if what == "config":
                del self.config

        def score(self, features, compositions=None):
            scores = super().score(features, compositions)
            return scores.mT if what == "order" else scores

        def feasibility(self, seen):
            return np.zeros(3) if what == "feasibility" else super().feasibility(seen)

        @property
        def loss(self):
            if what == "loss":
                raise AttributeError("loss")
            if what == "mean":
                return lambda features, target: features.mean(1)
            return super().loss

    monkeypatch.setitem(baselines.MODELS, "mine", Broken)
    monkeypatch.setitem(baselines.DEFAULTS, "mine", dict(other=dict(epochs=1)))
    out = tmp_path / "run"
    with pytest.raises(SystemExit):
        baselines.main(["--model", "mine", "--dataset", str(toy), "--device", "cpu",
                        "--out", str(out)])
    assert re.search(BROKEN[what], capsys.readouterr().err)
    assert not (out / "last.pt").exists()


def test_plain_loss_is_an_option(toy, tmp_path):  # noqa: F811
    """--plain-loss trains by compcos_loss itself; the numbers are those of the fused form up to
    rounding."""
    options = ["--recipe", "published", "--epochs", 3]
    fused = run(toy, tmp_path / "fused", *options)["test"]["open"]["exact"]["auc"]
    plain = run(toy, tmp_path / "plain", *options, "--plain-loss")["test"]["open"]["exact"]["auc"]
    assert plain == pytest.approx(fused, abs=0.02)


def smoothed(logits, target):
    """Cross-entropy with smoothed labels, (B,)."""
    return torch.nn.functional.cross_entropy(logits, target, reduction="none", label_smoothing=0.1)


class Shifted(CompCos):
    """Its scores are not those of Eq. 1."""

    def score(self, features, compositions):
        return super().score(features, compositions) + self.states.mean(1)[:, None]


@pytest.mark.parametrize("world, name, edited", [
    ("open", "image_losses", smoothed), ("open", "CompCos", Shifted),
    ("closed", "CompCos", Shifted)])
def test_an_edit_that_training_would_not_see_is_named(
        toy, tmp_path, monkeypatch, capsys, world, name, edited):  # noqa: F811
    """Before an earlier run is removed; by --plain-loss it trains."""
    options = ["--epochs", 1, "--members", 1, "--world", world]
    run(toy, tmp_path / "run", *options)
    monkeypatch.setattr(compcos, name, edited)
    with pytest.raises(SystemExit):
        run(toy, tmp_path / "run", *options)
    assert "train by --plain-loss" in capsys.readouterr().err
    assert (tmp_path / "run/metrics.json").exists()
    run(toy, tmp_path / "run", *options, "--plain-loss")


def test_partner_counts_from_the_definition():
    random = np.random.default_rng(0)
    seen = random.random((5, 7)) < 0.4
    expected = np.zeros(seen.shape)
    unseen = []
    for s, o in np.argwhere(~seen):
        expected[s, o] = np.log(seen[s].sum() + 0.5) + np.log(seen[:, o].sum() + 0.5)
        unseen.append(expected[s, o])
    expected = np.where(seen, 0, (expected - np.mean(unseen)) / np.std(unseen, ddof=1))
    np.testing.assert_allclose(compcos.log_partners(torch.as_tensor(seen)), expected, atol=1e-12)
    assert not compcos.log_partners(torch.ones(2, 3, dtype=torch.bool)).any()


def test_the_prior_is_chosen_on_validation_and_kept(toy, tmp_path):  # noqa: F811
    """Where the seen competed alone its weight is the best one by validation, which may be 0;
    best.pt holds it; with margins, and in the published recipe, there is none."""
    options = ["--epochs", 2, "--members", 2]
    metrics = run(toy, tmp_path / "closed", *options, "--world", "closed", "--save-scores")
    assert metrics["prior_weight"] in compcos.PRIOR_WEIGHTS
    assert_scores_as_saved(toy, tmp_path / "closed")
    published = ["--world", "closed", "--recipe", "published"]
    for number, extra in enumerate((["--rivals", "all"], published)):
        assert "prior_weight" not in run(toy, tmp_path / str(number), *options, *extra)


@pytest.mark.parametrize("seen_count, unseen_count, rivals", [
    (30, 0, "seen"), (30, 19, "seen"), (30, 20, "all"), (29, 19, "all"), (40, 19, "seen")])
def test_few_unseen_compositions_among_many_seen_do_not_compete(
        seen_count, unseen_count, rivals, capsys):
    """Of 60 at least 30 seen, and fewer than 20 unseen in validation: said, and can be undone."""
    seen = np.arange(60).reshape(6, 10) < seen_count
    shown = 59 - np.arange(unseen_count)
    dataset = SimpleNamespace(seen=seen, targets=dict(val=np.append(shown, 0)))
    assert experiment.choose_rivals(dataset, "open") == rivals
    assert ("--rivals all" in capsys.readouterr().out) == (rivals == "seen")


def test_the_rivals_of_a_run(toy, tmp_path):  # noqa: F811
    """Less than half of the toy's compositions are seen."""
    options = ["--epochs", 1, "--members", 1]
    found = {}
    for name, extra in dict(own=[], seen=["--rivals", "seen"],
                            published=["--recipe", "published"]).items():
        found[name] = run(toy, tmp_path / name, *options, *extra)["settings"]["rivals"]
    assert found == dict(own="all", seen="seen", published="all")


@pytest.mark.parametrize("plain", [False, True])
def test_the_seen_alone_compete_as_in_the_closed_world(plain):
    """With rivals "seen" the open world's loss is Eq. 2, before and after an epoch."""
    random = np.random.default_rng(0)
    seen = torch.tensor(random.random((4, 5)) < 0.5)
    seen[0, 0] = True
    features = torch.as_tensor(random.normal(size=(8, 6)), dtype=torch.float32)
    target = torch.as_tensor(random.choice(np.flatnonzero(seen), 8))
    torch.manual_seed(0)
    model = CompCos(random.normal(size=(4, 3)), random.normal(size=(5, 3)), 6, dropout=0.0)
    losses = []
    for choice in dict(world="closed"), dict(rivals="seen"):
        model.set_training(seen, plain=plain, **choice)
        for epoch in (1, 2):
            losses.append(float(model.loss(features, target).detach()))
            model.after_epoch(epoch)
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
    with pytest.raises(ValueError, match="rivals 'none'"):
        model.set_training(seen, rivals="none")


def test_the_best_weight_of_the_prior_wins():
    model = CompCos(np.eye(3), np.eye(3), 4)
    seen = torch.tensor([[True, True, False], [True, False, False], [False, False, True]])
    model.set_training(seen, world="closed", scale=2.0, partner_prior=True)
    expected = compcos.log_partners(seen).float()

    def likes(weight):
        def validate():
            prior = 0.0 if model.prior is None else model.prior
            return -float((2.0 * prior - weight * expected).abs().sum())
        return validate

    assert model.after_training(likes(0.3)) == dict(prior_weight=0.3)
    torch.testing.assert_close(model.prior, 0.3 * expected / 2.0)
    assert model.after_training(likes(0.0)) == dict(prior_weight=0.0) and model.prior is None


def test_a_mask_must_gain_more_than_it_is_expected_to_lose():
    """Of n exchangeable compositions and one more, a τ that hides r of the n is expected to leave
    n / (n + 1) of the share in sight: all ranks of the one more, counted."""
    for n in (19, 40):
        for hidden in (0, 1, 3):
            in_sight = []
            for rank in range(n + 1):  # of the next one, among the others, each as likely
                threshold_rank = hidden + 1 if rank < hidden + 1 else hidden
                in_sight.append(rank >= threshold_rank)
            kept = np.mean(in_sight) / (1 - hidden / n)
            assert kept == pytest.approx(1 - experiment.expected_loss(n), abs=1e-12)


def test_a_run_ends_with_commands_that_work(toy, tmp_path, capsys):  # noqa: F811
    """The last lines name a command that predicts and one that draws the curve, as they stand."""
    out = tmp_path / "a run"
    run(toy, out, "--epochs", 1, "--save-scores")
    steps = {}
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("  "):
            name, _, command = line.partition(":")
            steps[name.strip()] = shlex.split(command)
    assert steps["predict"][:2] == ["python", "compcos.py"] and steps["predict"][-1] == "FILE"
    compcos.main([*steps["predict"][2:-1], str(toy / "features.npz"), "--device", "cpu"])
    assert "candidates, bias" in capsys.readouterr().out
    assert steps["a curve"][:2] == ["python", "evaluate.py"]
    evaluate.main([steps["a curve"][2]])
    assert "AUC" in capsys.readouterr().out
