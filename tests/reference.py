"""The plain forms, as the equations stand: what tests hold the fast forms to.

Shapes: B images, F features, S states, O objects, P chosen pairs, D word vectors, K modules of w
numbers, R rows (an image with a composition).

The compared systems' forms take parameters by their published names: those of the golden files, or
`published(model)`. All of them take images x (B,F) and pairs (P,2) of state and object, and give
scores (B,P).
"""

import torch
from torch.nn import functional as nnf

from lab import baselines


# ---- the compared systems' parameters by their published names ----


def published(model, get=lambda tensor: tensor):
    """Published name -> view of our parameter or buffer (`get` of it: its gradient, say)."""
    if isinstance(model, baselines.TMN):
        names = published_tmn(model, get)
    else:
        names = {}
        for name, module in published_modules(model).items():
            names |= tensors(name, module, get)
    if isinstance(model, baselines.AttributesAsOperators):
        for state, operator in enumerate(get(model.operators)):
            names[f"attr_ops.{state}"] = operator
    if not isinstance(model, baselines.AttributesAsOperators):
        names["attr_embedder.weight"] = get(model.states)
    if not isinstance(model, baselines.SymNet):
        names["obj_embedder.weight"] = get(model.objects)
    return names


def tensors(name, module, get, part=...):
    """{"name.weight": get(module.weight)[part]} and so on, of what the module has."""
    found = {}
    for kind in ("weight", "bias", "running_mean", "running_var"):
        tensor = getattr(module, kind, None)
        if tensor is None:
            continue
        value = get(tensor)  # None for the gradient of what has none
        found[f"{name}.{kind}"] = None if value is None else value[part]
    return found


def published_modules(model):
    """Published name -> our module, for all but TMN."""
    if isinstance(model, baselines.SymNet):
        modules = {"image_embedder.mod.0": model.images}
        networks = {"attr_classifier": model.to_state, "obj_classifier": model.to_object,
                    "CoN_fc_attention": model.attach.attention, "CoN_emb": model.attach.combine,
                    "DecoN_fc_attention": model.detach.attention, "DecoN_emb": model.detach.combine}
        for name, network in networks.items():
            modules[f"{name}.mod.0"] = network[0]
            modules[f"{name}.mod.3"] = network[3]
        return modules
    modules = {"image_embedder.mod.0": model.images[0]}
    if isinstance(model, baselines.LabelEmbedPlus):
        modules["T.mod.0"] = model.compose[0]
        modules["T.mod.2"] = model.compose[2]
    else:
        modules["attr_clf"] = model.to_state
        modules["obj_clf"] = model.to_object
    return modules


def published_tmn(model, get):
    """TMN's parameters: the published code has a module of its own for each, ours are stacked."""
    width = model.settings.width
    names = {}
    for module in range(model.settings.modules):
        part = slice(module * width, (module + 1) * width)  # of the stacked layers
        first = f"comp_network._module_list.0.{module}"
        names |= tensors(f"{first}.0", model.first, get, part)
        names |= tensors(f"{first}.1", model.first_norm, get, part)
        for row, layer in enumerate(model.layers, 1):
            name = f"comp_network._module_list.{row}.{module}"
            names |= tensors(f"{name}.0", layer.before, get, part)
            names |= tensors(f"{name}.1", layer, get, module)
            names |= tensors(f"{name}.2", layer.after, get, part)
    last = f"comp_network._end_modules.0.{len(model.layers)}"
    names |= tensors(f"{last}.0", model.last_norm, get)
    names |= tensors(f"{last}.1", model.last, get)
    gater = "gating_network.gater"
    names |= tensors(f"{gater}.task_linear1", model.gater, get)
    names |= tensors(f"{gater}.task_bn1", model.gater_norm, get)
    names |= tensors(f"{gater}.joint_linear2", model.gates, get)
    return names


# ---- the compared systems' scores ----


def linear(parameters, name, x):
    """x W^T + b, without b if there is none."""
    return nnf.linear(x, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))


def two_layers(parameters, name, x):
    """Linear, ReLU, Linear; no dropout."""
    hidden = torch.relu(linear(parameters, f"{name}.mod.0", x))
    return linear(parameters, f"{name}.mod.3", hidden)


def word_pairs(parameters, pairs):
    """[e_s; e_o] of the pairs, (P,2D)."""
    states = parameters["attr_embedder.weight"][pairs[:, 0]]
    objects = parameters["obj_embedder.weight"][pairs[:, 1]]
    return torch.cat([states, objects], 1)


def direct_distances(images, embeddings):
    """-|v - c|^2 (B,P), a pair at a time."""
    scores = []
    for embedding in embeddings:
        scores.append(-(images - embedding).square().sum(1))
    return torch.stack(scores, 1)


def direct_leplus(parameters, x, pairs):
    """LabelEmbed+: c = ReLU(Linear(ReLU(Linear([e_s; e_o]))))."""
    hidden = torch.relu(linear(parameters, "T.mod.0", word_pairs(parameters, pairs)))
    embeddings = torch.relu(linear(parameters, "T.mod.2", hidden))
    images = torch.relu(linear(parameters, "image_embedder.mod.0", x))
    return direct_distances(images, embeddings)


def direct_aop(parameters, x, pairs):
    """Attributes as Operators: c = ReLU(M_s e_o)."""
    words = parameters["obj_embedder.weight"]
    embeddings = []
    for state, object_ in pairs.tolist():
        embeddings.append(torch.relu(parameters[f"attr_ops.{state}"] @ words[object_]))
    images = torch.relu(linear(parameters, "image_embedder.mod.0", x))
    return direct_distances(images, torch.stack(embeddings))


def direct_transform(parameters, name, x, state):
    """SymNet's CoN or DeCoN: MLP2([x + x * sigmoid(MLP1(a)); a])."""
    x = x + x * two_layers(parameters, f"{name}_fc_attention", state).sigmoid()
    return two_layers(parameters, f"{name}_emb", torch.cat([x, state], 1))


def direct_symnet(parameters, x, pairs):
    """SymNet: softmax(rmd)_s * softmax(obj(v))_o, rmd = |DeCoN(v, a) - v| - |CoN(v, a) - v|."""
    images = linear(parameters, "image_embedder.mod.0", x)
    moving = []
    for state in parameters["attr_embedder.weight"]:
        state = state.expand(len(images), -1)
        attached = direct_transform(parameters, "CoN", images, state)
        detached = direct_transform(parameters, "DecoN", images, state)
        moving.append((detached - images).norm(dim=1) - (attached - images).norm(dim=1))
    states = torch.stack(moving, 1).softmax(1)                                # (B,S)
    objects = two_layers(parameters, "obj_classifier", images).softmax(1)     # (B,O)
    return states[:, pairs[:, 0]] * objects[:, pairs[:, 1]]


# ---- TMN ----


def direct_norm(parameters, name, x):
    """BatchNorm by the running statistics."""
    return nnf.batch_norm(x, parameters[f"{name}.running_mean"], parameters[f"{name}.running_var"],
                        parameters[f"{name}.weight"], parameters[f"{name}.bias"])


def direct_gates(parameters, pairs, modules):
    """The gates of rows (R,2), (R,modules) each: one a module and layer, and one for the end."""
    gater = "gating_network.gater"
    hidden = linear(parameters, f"{gater}.task_linear1", word_pairs(parameters, pairs))
    hidden = torch.relu(direct_norm(parameters, f"{gater}.task_bn1", hidden))
    logits = linear(parameters, f"{gater}.joint_linear2", hidden)
    return [group.softmax(1) for group in logits.split(modules, 1)]


def mixed(gate, outputs):
    """The sum over modules of gate i times output i: (R,K), (R,K,w) -> (R,w)."""
    return torch.bmm(gate[:, None], outputs).squeeze(1)


def direct_tmn(parameters, x, pairs):
    """Outputs (R,) of rows x (R,F), pairs (R,2): module after module, as published."""
    network = "comp_network._module_list"
    places = [key.split(".")[2:4] for key in parameters if key.startswith(network)]
    layers = 1 + max(int(layer) for layer, _ in places)
    modules = 1 + max(int(module) for _, module in places)
    gates = iter(direct_gates(parameters, pairs, modules))

    outputs = []
    for module in range(modules):
        name = f"{network}.0.{module}"
        inputs = linear(parameters, f"{name}.0", x)
        outputs.append(torch.relu(direct_norm(parameters, f"{name}.1", inputs)))
    outputs = torch.stack(outputs, 1)                                         # (R,K,w)

    for layer in range(1, layers):
        later = []
        for module in range(modules):
            name = f"{network}.{layer}.{module}"
            inputs = mixed(next(gates), outputs)                              # (R,w)
            inputs = direct_norm(parameters, f"{name}.0", inputs)
            inputs = linear(parameters, f"{name}.1", inputs)
            later.append(torch.relu(direct_norm(parameters, f"{name}.2", inputs)))
        outputs = torch.stack(later, 1)

    last = f"comp_network._end_modules.0.{layers - 1}"
    inputs = direct_norm(parameters, f"{last}.0", mixed(next(gates), outputs))
    return linear(parameters, f"{last}.1", inputs).squeeze(1)


def direct_tmn_scores(parameters, x, pairs):
    """TMN's scores, a pair at a time."""
    scores = []
    for pair in pairs:
        scores.append(direct_tmn(parameters, x, pair.expand(len(x), 2)))
    return torch.stack(scores, 1)


DIRECT = {"leplus": direct_leplus, "aop": direct_aop, "symnet": direct_symnet,
          "tmn": direct_tmn_scores}
