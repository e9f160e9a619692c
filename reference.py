"""The plain forms, as the equations stand: what the tests and `benchmark.py` hold the fast forms against.

B images, F features, S states, O objects, C = S*O compositions, P chosen pairs, D shared space.
The compared systems' forms take parameters under the published names: those of the golden files, or `published(model)`.
"""

import torch
from torch.nn import functional as F

import baselines
from compcos import compcos_loss


def plain_cosines(model, features):
    """Eq. 1 as it is written: every composition embedded by W [φ(s); φ(o)], a (C, D) matrix; (B, S, O)."""
    S, O = len(model.states), len(model.objects)
    pairs = torch.cartesian_prod(torch.arange(S), torch.arange(O)).to(features.device)
    return (model.embed_images(features) @ model.embed_compositions(pairs).T).view(-1, S, O)


def plain_step(model, optimizer, features, target, *, scale, seen, margin):
    """A training step of the open world in the plain form, the baseline of benchmark.py."""
    optimizer.zero_grad()
    loss = compcos_loss(plain_cosines(model, features), target, scale=scale, seen=seen, margin=margin)
    loss.backward()
    optimizer.step()
    return loss


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
        with_it, without = direct_net(p, "CoN", v, state), direct_net(p, "DecoN", v, state)
        moving.append((without - v).norm(dim=1) - (with_it - v).norm(dim=1))
    states, objects = torch.stack(moving, 1).softmax(1), two_layers(p, "obj_classifier", v).softmax(1)
    return states[:, pairs[:, 0]] * objects[:, pairs[:, 1]]


def direct_tmn(p, x, pairs, training):
    """Outputs (R,) of rows x (R,F), pairs (R,2): module after module; running statistics change in training."""

    def norm(name, x):
        return F.batch_norm(x, p[f"{name}.running_mean"], p[f"{name}.running_var"], p[f"{name}.weight"],
                            p[f"{name}.bias"], training)

    words = torch.cat([p["attr_embedder.weight"][pairs[:, 0]], p["obj_embedder.weight"][pairs[:, 1]]], 1)
    gater, network = "gating_network.gater", "comp_network._module_list"
    hidden = torch.relu(norm(f"{gater}.task_bn1", linear(p, f"{gater}.task_linear1", words)))
    logits = linear(p, f"{gater}.joint_linear2", hidden)
    layers = 1 + max(int(key.split(".")[2]) for key in p if key.startswith(network))
    size = 1 + max(int(key.split(".")[3]) for key in p if key.startswith(network))
    groups = iter(logits.split(size, 1))

    def mixed():  # the sum of gate i times output i
        return torch.bmm(next(groups).softmax(1)[:, None], outputs).squeeze(1)

    names = [f"{network}.0.{j}" for j in range(size)]
    outputs = torch.stack([torch.relu(norm(f"{name}.1", linear(p, f"{name}.0", x))) for name in names], 1)
    for row in range(1, layers):
        names = [f"{network}.{row}.{j}" for j in range(size)]
        inputs = [linear(p, f"{name}.1", norm(f"{name}.0", mixed())) for name in names]
        outputs = torch.stack([torch.relu(norm(f"{name}.2", x)) for name, x in zip(names, inputs)], 1)
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
