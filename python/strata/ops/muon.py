"""Muon: the momentum of matrices, orthogonalized by Newton-Schulz; AdamW for other parameters. Idea: K. Jordan 2024."""

import math

import torch

SIMPLE = (3.4445, -4.7750, 2.0315)
_TOGETHER = 1 << 24  # elements of equal matrices that are multiplied in one call
_MOST = 16  # matrices of them


def newton_schulz(matrices, coefficients=SIMPLE, steps=5, eps=1e-7):
    """Tensor in bf16: ``matrices`` [..., rows, columns], each with its singular values brought near 1. The operations
    are those of ``torch.optim.Muon``. ``coefficients``: three numbers, or three for each step."""
    by_step = [coefficients] * steps if not isinstance(coefficients[0], (tuple, list)) else coefficients
    x = matrices.to(torch.bfloat16, copy=True)
    is_tall = x.size(-2) > x.size(-1)
    x = x.mT if is_tall else x
    if x.dim() == 2:
        x.div_(x.norm().clamp(min=eps))
        for a, b, c in by_step:
            gram = x @ x.mT
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    else:
        x.div_(x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps))
        for a, b, c in by_step:
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def factor_of(rows, columns, adjust_lr_fn=None):
    """float: the factor of the update of a matrix. ``adjust_lr_fn``: as torch's; None is "original"."""
    if adjust_lr_fn in (None, "original"):
        return math.sqrt(max(1, rows / columns))
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    raise ValueError(f'adjust_lr_fn must be None, "original" or "match_rms_adamw"; found {adjust_lr_fn!r}')


class Matrices:
    """How one parameter consists of matrices. ``shape``: the parameter's. More than two dimensions: experts, each a
    matrix, or, where ``is_convolution``, one matrix of a row for each output. ``cuts``: numbers of rows of the matrices
    that lie in one; None: one. ``heads``: rows of each head, which then is a matrix; None: they are not apart."""

    def __init__(self, shape, is_convolution=False, cuts=None, heads=None):
        self.shape = [shape[0], math.prod(shape[1:])] if is_convolution else list(shape)
        self.cuts = cuts or [self.shape[-2]]
        self.heads = heads

    def _forms(self):
        return [(self.heads or rows, self.shape[-1]) for rows in self.cuts]

    @property
    def cost(self):
        """float: the products of Newton-Schulz for all matrices, s^2 (2l + s) for each of sides s <= l."""
        costs = (rows // form[0] * min(form) ** 2 * (2 * max(form) + min(form))
                 for rows, form in zip(self.cuts, self._forms()))  # fmt: skip
        return float(math.prod(self.shape[:-2]) * sum(costs))

    def factor(self, adjust_lr_fn):
        """float: the largest factor of a matrix; ``orthogonalize`` has what others lack."""
        return max(factor_of(*form, adjust_lr_fn) for form in self._forms())

    @property
    def are_apart(self):
        """Whether each element of the first dimension has matrices of its own."""
        return len(self.shape) > 2

    def orthogonalize(self, values, group):
        """Replaces ``values``, flat and in bf16, by the update: Newton-Schulz's result of each matrix."""
        orthogonalize([(self, values, group)])

    def parts(self, values, group):
        """[(view of ``values``, share of the factor)] of equal matrices. ``values``: of the parameter, or of some
        elements of its first dimension where ``are_apart``. A view of two dimensions is one matrix."""
        whole = values.view(-1, *self.shape[1:]) if self.are_apart else values.view(self.shape)
        largest, parts, begin = self.factor(group["adjust_lr_fn"]), [], 0
        for rows, form in zip(self.cuts, self._forms(), strict=True):
            part = whole.narrow(-2, begin, rows)
            begin += rows
            parts.append((part.unflatten(-2, (-1, self.heads)) if self.heads else part,
                          factor_of(*form, group["adjust_lr_fn"]) / largest))
        return parts


def orthogonalize(matrices):
    """Replaces the flat values in bf16 of [(Matrices, values, param group)] by their updates. Matrices that are not
    alone in their part go in batches, each of one size for one form, so that a matrix has the same bits in any
    company; what a batch lacks is zero."""
    batches = {}  # {(form, settings): [(matrix, share)]}
    for of, values, group in matrices:
        settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
        for part, share in of.parts(values, group):
            if part.dim() == 2:
                _replace(part, newton_schulz(part, *settings), share)
                continue
            key = (tuple(part.shape[-2:]), _hashable(settings))
            flat = part.flatten(0, -3) if part.dim() > 3 else part
            batches.setdefault(key, (settings, []))[1].append((flat, share))
    for (form, _), (settings, parts) in batches.items():
        at_once = max(1, min(_MOST, _TOGETHER // math.prod(form)))
        at_once = 1 << at_once.bit_length() - 1  # as numbers of experts and heads are: few batches are not full
        for some in _filled(parts, at_once):
            batch = torch.cat([part for part, _ in some])
            lacking = at_once - len(batch)
            batch = torch.cat([batch, batch.new_zeros(lacking, *form)]) if lacking else batch
            results = newton_schulz(batch, *settings)
            for (part, share), result in zip(some, results.split([len(p) for p, _ in some] + [lacking])):
                _replace(part, result, share)


def _replace(part, result, share):
    part.copy_(result if share == 1.0 else result.float() * share)


def _hashable(settings):
    return tuple(map(_hashable, settings)) if isinstance(settings, (tuple, list)) else settings


def _filled(parts, at_once):
    """Yields lists of (views of ``parts``, share) of ``at_once`` matrices together; the last may have fewer."""
    some, room = [], at_once
    for part, share in parts:
        while len(part):
            some.append((part[:room], share))
            room -= len(some[-1][0])
            part = part[len(some[-1][0]):]
            if room == 0:
                yield some
                some, room = [], at_once
    if some:
        yield some


class Muon(torch.optim.Optimizer):
    """Muon for the param groups with ``use_muon``, AdamW for the others. ``strata.initialize`` runs it in the engine;
    it also runs by itself, with the same bits on CPUs. ``torch.optim.Muon`` may differ in the last bit of an update,
    since it adds without rounding the product. ``state`` has of a matrix ``momentum_buffer`` in fp32, of others
    ``step``, ``exp_avg`` and ``exp_avg_sq``.

    Args:
        params: dicts of param groups, or parameters, which all get Muon.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as ``torch.optim.Muon``'s.
        A group without ``use_muon`` has ``betas``; its ``lr`` and ``eps`` are AdamW's.
    """

    def __init__(self, params, lr=0.02, weight_decay=0.0, momentum=0.95, nesterov=True, ns_coefficients=SIMPLE,
                 eps=1e-7, ns_steps=5, adjust_lr_fn=None):
        factor_of(1, 1, adjust_lr_fn)
        settings = {"use_muon": True, "lr": lr, "weight_decay": weight_decay, "momentum": momentum,
                    "nesterov": nesterov, "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps,
                    "adjust_lr_fn": adjust_lr_fn}  # fmt: skip
        super().__init__(params, settings)
        self.matrices = {}  # {id(parameter): Matrices}; others are one, or one for each of their first dimensions

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            members = [p for p in group["params"] if p.grad is not None]
            if not group["use_muon"]:
                self._adamw(group, members)
                continue
            for p in members:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p, dtype=torch.float32))
                gradient = p.grad.float()
                buffer.lerp_(gradient, 1 - group["momentum"])
                x = torch.lerp(gradient, buffer, group["momentum"]) if group["nesterov"] else buffer
                matrices = self.matrices.get(id(p)) or Matrices(p.shape)
                update = x.to(torch.bfloat16, copy=True).contiguous().view(-1)
                matrices.orthogonalize(update, group)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update.view(p.shape).float() * (-group["lr"] * matrices.factor(group["adjust_lr_fn"])))

    def _adamw(self, group, members):
        from torch.optim.adamw import adamw  # torch's compiler comes with it

        for p in members:
            if not self.state[p]:
                self.state[p].update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p),
                                     exp_avg_sq=torch.zeros_like(p))
        states = [[self.state[p][key] for p in members] for key in ("exp_avg", "exp_avg_sq", "step")]
        adamw(members, [p.grad for p in members], *states[:2], [], states[2], foreach=False, amsgrad=False,
              beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"], weight_decay=group["weight_decay"],
              eps=group["eps"], maximize=False)
