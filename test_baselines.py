"""Tests of baselines.py: the golden files, direct forms written from the equations, the draws.

The direct forms (a loop over pairs, over states, over modules) are also what `benchmark.py baselines` measures against.
They take parameters under the published names: those of the golden files, or `published(model)`.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import baselines

GOLDEN = np.load(Path(__file__).parent / "testdata/baselines.npz")
EXPECTED = json.loads((Path(__file__).parent / "testdata/baselines.json").read_text())["losses"]
NAMES = {"leplus": "label_embed_plus", "aop": "attributes_as_operators", "symnet": "symnet", "tmn": "tmn"}
S, O = 16, 12


def golden(name, dtype=torch.float32):
    array = torch.from_numpy(GOLDEN[name])
    return array.to(dtype) if array.is_floating_point() else array.long()


def published(model, get=lambda tensor: tensor):
    """Published name -> view of our parameter or buffer (`get` of it: its gradient, say)."""
    names = {}

    def add(prefix, module, index=..., kinds=("weight", "bias", "running_mean", "running_var")):
        for kind in kinds:
            if getattr(module, kind, None) is not None:
                value = get(getattr(module, kind))
                names[f"{prefix}.{kind}"] = None if value is None else value[index]

    if isinstance(model, baselines.TMN):
        size, width = model.config["modules"], model.config["width"]
        for j in range(size):
            part = slice(j * width, (j + 1) * width)
            add(f"comp_network._module_list.0.{j}.0", model.first, part)
            add(f"comp_network._module_list.0.{j}.1", model.first_norm, part)
            for row, layer in enumerate(model.layers, 1):
                add(f"comp_network._module_list.{row}.{j}.0", layer.before, part)
                add(f"comp_network._module_list.{row}.{j}.1", layer, j)
                add(f"comp_network._module_list.{row}.{j}.2", layer.after, part)
        last = f"comp_network._end_modules.0.{len(model.layers)}"
        for name, module in ((f"{last}.0", model.last_norm), (f"{last}.1", model.last),
                             ("gating_network.gater.task_linear1", model.gater),
                             ("gating_network.gater.task_bn1", model.gater_norm),
                             ("gating_network.gater.joint_linear2", model.gates)):
            add(name, module)
    elif isinstance(model, baselines.SymNet):
        add("image_embedder.mod.0", model.images)
        for name, net in (("attr_classifier", model.to_state), ("obj_classifier", model.to_object),
                          ("CoN_fc_attention", model.attach.attention), ("CoN_emb", model.attach.combine),
                          ("DecoN_fc_attention", model.detach.attention), ("DecoN_emb", model.detach.combine)):
            add(f"{name}.mod.0", net[0])
            add(f"{name}.mod.3", net[3])
    else:
        add("image_embedder.mod.0", model.images[0])
        if isinstance(model, baselines.LabelEmbedPlus):
            add("T.mod.0", model.compose[0])
            add("T.mod.2", model.compose[2])
        else:
            add("attr_clf", model.to_state)
            add("obj_clf", model.to_object)
            names |= {f"attr_ops.{s}": value for s, value in enumerate(get(model.operators))}
    if not isinstance(model, baselines.AttributesAsOperators):
        names["attr_embedder.weight"] = get(model.states)
    if not isinstance(model, baselines.SymNet):
        names["obj_embedder.weight"] = get(model.objects)
    return names


def linear(parameters, name, x):
    return F.linear(x, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))


def two_layers(parameters, name, x):
    return linear(parameters, f"{name}.mod.3", torch.relu(linear(parameters, f"{name}.mod.0", x)))


def direct_distances(images, embeddings):
    """-|v - c|^2, a pair at a time."""
    return torch.stack([-(images - embedding).square().sum(1) for embedding in embeddings], 1)


def direct_leplus(p, x, pairs):
    words = torch.cat([p["attr_embedder.weight"][pairs[:, 0]], p["obj_embedder.weight"][pairs[:, 1]]], 1)
    embeddings = torch.relu(linear(p, "T.mod.2", torch.relu(linear(p, "T.mod.0", words))))
    return direct_distances(torch.relu(linear(p, "image_embedder.mod.0", x)), embeddings)


def direct_aop(p, x, pairs):
    words = p["obj_embedder.weight"]
    embeddings = torch.stack([torch.relu(p[f"attr_ops.{s}"] @ words[o]) for s, o in pairs.tolist()])
    return direct_distances(torch.relu(linear(p, "image_embedder.mod.0", x)), embeddings)


def direct_net(p, name, x, state):
    x = x + x * two_layers(p, f"{name}_fc_attention", state).sigmoid()
    return two_layers(p, f"{name}_emb", torch.cat([x, state], 1))


def direct_symnet(p, x, pairs):
    v = linear(p, "image_embedder.mod.0", x)
    moving = []
    for state in p["attr_embedder.weight"]:
        state = state.expand(len(v), -1)
        moving.append((direct_net(p, "DecoN", v, state) - v).norm(dim=1) - (direct_net(p, "CoN", v, state) - v).norm(dim=1))
    states, objects = torch.stack(moving, 1).softmax(1), two_layers(p, "obj_classifier", v).softmax(1)
    return states[:, pairs[:, 0]] * objects[:, pairs[:, 1]]


def direct_tmn(p, x, pairs, training, layers=3):
    """Outputs (R,) of rows x (R,F), pairs (R,2): module after module; running statistics change in training."""

    def norm(name, x):
        return F.batch_norm(x, p[f"{name}.running_mean"], p[f"{name}.running_var"], p[f"{name}.weight"],
                            p[f"{name}.bias"], training)

    words = torch.cat([p["attr_embedder.weight"][pairs[:, 0]], p["obj_embedder.weight"][pairs[:, 1]]], 1)
    gater, network = "gating_network.gater", "comp_network._module_list"
    hidden = torch.relu(norm(f"{gater}.task_bn1", linear(p, f"{gater}.task_linear1", words)))
    logits = linear(p, f"{gater}.joint_linear2", hidden)
    size = sum(key.startswith(f"{network}.0.") and key.endswith(".0.weight") for key in p)
    groups = iter(logits.split(size, 1))

    def mixed():  # the sum of gate i times output i
        return torch.bmm(next(groups).softmax(1)[:, None], outputs).squeeze(1)

    outputs = torch.stack([torch.relu(norm(f"{network}.0.{j}.1", linear(p, f"{network}.0.{j}.0", x))) for j in range(size)], 1)
    for row in range(1, layers):
        names = [f"{network}.{row}.{j}" for j in range(size)]
        outputs = torch.stack([torch.relu(norm(f"{name}.2", linear(p, f"{name}.1", norm(f"{name}.0", mixed())))) for name in names], 1)
    name = f"comp_network._end_modules.0.{layers - 1}"
    return linear(p, f"{name}.1", norm(f"{name}.0", mixed())).squeeze(1)


def direct_tmn_scores(p, x, pairs):
    return torch.stack([direct_tmn(p, x, pair.expand(len(x), 2), False) for pair in pairs], 1)


def direct_tmn_loss(p, x, pairs):
    """pairs (B,1+n,2), the truth first; the running statistics change."""
    rows = x[:, None].expand(-1, pairs.shape[1], -1).flatten(0, 1)
    scores = direct_tmn(p, rows, pairs.flatten(0, 1), True).view(len(x), -1)
    return F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))


DIRECT = {"leplus": direct_leplus, "aop": direct_aop, "symnet": direct_symnet, "tmn": direct_tmn_scores}


def golden_model(name, dtype=torch.float32):
    """The model with the golden parameters, in evaluation mode (no dropout), and its golden loss."""
    prefix = f"{NAMES[name]}/param/"
    dim = GOLDEN[prefix + ("obj_embedder" if name == "aop" else "attr_embedder") + ".weight"].shape[1]
    options = {"tmn": {"modules": 4, "width": 6, "rank": 8, "negatives": 5}}.get(name, {})
    model = baselines.MODELS[name](np.zeros((S, dim)), np.zeros((O, dim)), 32, np.ones((S, O), bool), **options)
    with torch.no_grad():
        for key, value in published(model).items():
            given = golden(prefix + key)
            if key.endswith("embedder.weight"):
                given = given[: len(value)]  # TMN has one more row, unused
            if key.endswith("joint_linear2.weight"):
                given = given[1 + 4 :]  # logits of softmaxes over one number
            assert given.shape == value.shape, key
            value.copy_(given)
    model = model.to(dtype).eval()
    target = golden("state") * O + golden("object")
    negatives = golden("neg_state") * O + golden("neg_object")
    third = (golden("comm_state"),) if name == "aop" else ()
    return model, model.loss(golden("x", dtype), target, negatives, *third)


@pytest.mark.parametrize("name", NAMES)
def test_golden_loss_gradients_and_scores(name):
    model, loss = golden_model(name)
    expected = EXPECTED[NAMES[name]]
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-5)
    loss.backward()
    gradients = published(model, lambda tensor: tensor.grad)
    for key, norm in expected["grad_norms"].items():
        ours = gradients.get(key)
        ours = 0.0 if ours is None else ours.norm().item()
        if norm is None or norm < 1e-6:
            assert ours < 1e-6, key
        else:
            assert ours == pytest.approx(norm, rel=2e-4), key
    if name == "tmn":
        for key, value in published(model).items():
            if "running" in key:
                np.testing.assert_allclose(value.numpy(), GOLDEN[f"tmn/after/{key}"], rtol=1e-5, atol=1e-6)
    state, object_ = golden("pairs").T
    with torch.no_grad():
        scores = model(golden("x")[:8])[:, state, object_]
    np.testing.assert_allclose(scores.numpy(), GOLDEN[f"{NAMES[name]}/scores"], rtol=1e-5)
