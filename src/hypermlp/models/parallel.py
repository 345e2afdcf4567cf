"""A model on several processes at once: heads divided (tp), sequences divided (cp), parameters and the batch divided (dp).

Every process computes with plain tensors. A process's part of a layer is a smaller layer of the same kind, with some of the
heads, so it takes every way that a whole layer takes, compiled ones and decoding among them; what all parts give is summed.
Parameters are distributed tensors, so optimisers, the norm of the gradient and checkpoints see the whole model. Those that join
several projections (Cut.blocks) have the processes as first dimension, since each has a part of every block: see `stacked`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.func import functional_call

from hypermlp.cache import CacheSpec
from hypermlp.checks import divisible
from hypermlp.collectives import Gather, RowShare, Sum, SumGradient
from hypermlp.mixers.base import Cut, Mixer, copy_parameters
from hypermlp.models.lm import GELU, LanguageModel, SwiGLU

DIMENSIONS = ("dp", "cp", "tp")
FEED_FORWARD = {"gate.weight": Cut(), "up.weight": Cut(), "up.bias": Cut(), "down.weight": Cut(dim=1)}
AFTER_SUM = ("o.bias", "down.bias")  # added once, to the sum over all processes


def make_mesh(sizes: Mapping[str, int], device_type: str = "cpu") -> DeviceMesh:
    """The mesh of all processes, for parallelize.

    Args:
        sizes: processes by dimension: "dp" divides the batch and the parameters, "cp" sequences, "tp" heads. Their product is
            the number of processes; a dimension that is left out has one.
        device_type: "cpu" or "cuda".
    """
    unknown = sorted(set(sizes) - set(DIMENSIONS))
    if unknown:
        raise ValueError(f"unknown mesh dimensions {unknown}; known are {', '.join(DIMENSIONS)}")
    shape = tuple(sizes.get(name, 1) for name in DIMENSIONS)
    return init_device_mesh(device_type, shape, mesh_dim_names=DIMENSIONS)


def parallelize(model: nn.Module, mesh: DeviceMesh, *, mp_policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    """Spread a LanguageModel, or one mixer, over the processes of a mesh, in place; all of them call it, before an optimiser.

    The weights of the first process are everybody's. With tp all processes of a row of the mesh give the same input and get the
    same output. With cp each gives its own rows of every sequence, own_rows(x, mesh), and gets theirs. With dp or cp gradients
    are averaged over these processes, as if each had computed the mean loss of what it was given (fully_shard).

    Args:
        model: on this process's device; a mixer or a size that cannot be divided is refused, and nothing has changed then.
        mesh: made by make_mesh, or any mesh with some of the dimensions dp, cp, tp by these names.
        mp_policy: of fully_shard: in which type parameters are gathered and gradients are summed.
    """
    names = mesh.mesh_dim_names or ()
    unknown = sorted(set(names) - set(DIMENSIONS))
    if unknown or not names:
        raise ValueError(f"the mesh has dimensions {list(names)}; name them {', '.join(DIMENSIONS)} (hypermlp.make_mesh)")
    size = {name: mesh[name].size() if name in names else 1 for name in DIMENSIONS}
    mixers = {place: module for place, module in model.named_modules() if isinstance(module, Mixer)}
    if not mixers:
        raise ValueError(f"{type(model).__name__} holds no mixer; give a LanguageModel, or a mixer")
    rows = RowShare(mesh["cp"].get_group()) if size["cp"] > 1 else None
    if rows is not None:
        check_rows(model, mixers.values())
    shared = tuple(name for name in ("dp", "cp") if size[name] > 1)
    for name in shared:
        agree(model, mesh[name].get_group())
    if size["tp"] > 1:
        divide(model, mixers, mesh["tp"], rows)
    elif rows is not None:
        for mixer in mixers.values():
            share_rows(mixer, rows)
    if shared:
        over = mesh[shared[0]] if len(shared) == 1 else mesh[shared]._flatten("dp_cp")
        options: dict[str, Any] = {"mesh": over, "mp_policy": mp_policy or MixedPrecisionPolicy()}
        options["shard_placement_fn"] = lambda p: even(p, over.size())
        for block in model.blocks if isinstance(model, LanguageModel) else ():
            fully_shard(block, **options)
        fully_shard(model, **options)
    return model


@torch.no_grad()
def agree(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all processes of a group the weights of its first; tp does so where it divides them."""
    for p in model.parameters():
        if not p.is_meta:
            dist.broadcast(p, group=group, group_src=0)


def own_rows(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """This process's part of whole sequences x (B T …): all where the mesh has no cp, else an early and a late piece."""
    if "cp" not in (mesh.mesh_dim_names or ()) or mesh["cp"].size() == 1:
        return x
    return RowShare(mesh["cp"].get_group()).of(x)


def in_blocks(model: nn.Module) -> dict[str, Cut]:
    """The parameters that are `stacked`, by name, and how."""
    divided = [(place, module) for place, module in model.named_modules() if isinstance(module, Divided)]
    cuts = {f"{place}.{name}".removeprefix("."): cut for place, m in divided for name, cut in m.cuts.items()}
    return {name: cuts[name] for name, _ in model.named_parameters() if name in cuts and len(cuts[name].blocks) > 1}


def stacked(p: Tensor, cut: Cut, count: int) -> Tensor:
    """p (rows …) as (count, rows / count …): what each of the processes has of all blocks, one below the other."""
    return torch.cat([block.unflatten(0, (count, -1)) for block in p.split(cut.sizes(p.shape[0]))], dim=1)


def unstacked(p: Tensor, cut: Cut) -> Tensor:
    """The inverse of stacked."""
    return torch.cat([block.flatten(0, 1) for block in p.split(cut.sizes(p.shape[1]), dim=1)])


def check_rows(model: nn.Module, mixers: Iterable[Mixer]) -> None:
    """Refuse what cannot share a sequence."""
    if isinstance(model, LanguageModel) and model.positions is not None:
        raise ValueError('learned positions (style="gpt2") would restart in every piece of a sequence; use style="llama"')
    for mixer in mixers:
        if type(mixer).mix_rows is Mixer.mix_rows:
            mixer.mix_rows(torch.empty(0), cast("RowShare", None))  # says why


def divide(model: nn.Module, mixers: Mapping[str, Mixer], mesh: DeviceMesh, rows: RowShare | None) -> None:
    """Divide heads and feed-forwards, and tell all other modules with parameters that theirs are distributed tensors."""
    count = mesh.size()
    plans: list[tuple[nn.Module, nn.Module, dict[str, Cut]]] = []
    for module in model.modules():  # first all that can be refused
        if isinstance(module, Mixer):
            plans.append((module, module.part(count), module.cuts()))
        elif isinstance(module, (SwiGLU, GELU)):
            divisible("inner", module.up.out_features, count, f"the {count} processes that share it (tp)")
            plans.append((module, copy.deepcopy(module).to("meta"), FEED_FORWARD))
    for module, part, _ in plans:
        check_unchanged(module, part)
    inside = {id(inner) for module, _, _ in plans for inner in module.modules()}
    around = [m for m in model.modules() if id(m) not in inside and any(p is not None for p in m._parameters.values())]
    if any(next(m.children(), None) is not None for m in around):
        raise ValueError(f"{type(model).__name__} has parameters beside its modules; give a LanguageModel, or a mixer")
    made: dict[nn.Parameter, nn.Parameter] = {}  # a tied head stays tied
    for module, part, cuts in plans:
        distribute(module, mesh, cuts, made)
        if isinstance(part, Mixer):
            part.group = mesh.get_group()
            if rows is not None:
                share_rows(part, rows)
        adopt(module, DividedMixer if isinstance(module, Mixer) else Divided, part=part, cuts=cuts, group=mesh.get_group())
    for module in around:
        part = copy.deepcopy(module).to("meta")
        distribute(module, mesh, {}, made)
        adopt(module, Local, part=part)


def check_unchanged(module: nn.Module, part: nn.Module) -> None:
    """Refuse a layer with other tensors than its kind has, such as codes of weights or adapters."""
    own, usual = ({*dict(m.named_parameters()), *dict(m.named_buffers())} for m in (module, part))
    if own != usual or not all(p.is_floating_point() for p in module.parameters()):
        what = ", ".join(sorted(own ^ usual)[:3]) or "weights as codes"
        raise ValueError(
            f"{type(module).__name__} has been changed ({what}): use a model with its own weights, and merge adapters or "
            "quantise afterwards"
        )


def even(p: Tensor, processes: int) -> Shard | None:
    """Along which dimension fully_shard divides a parameter evenly; what it divides unevenly is padded. None: along none."""
    return next((Shard(dim) for dim, size in enumerate(local(p).shape) if size % processes == 0), None)


def distribute(module: nn.Module, mesh: DeviceMesh, cuts: Mapping[str, Cut], made: dict[nn.Parameter, nn.Parameter]) -> None:
    """Make all parameters in a module distributed tensors."""
    for name, p in list(module.named_parameters(remove_duplicate=False)):
        cut = cuts.get(name)
        if p not in made:
            value, placement = p.detach(), Replicate() if cut is None else Shard(cut.dim)
            if cut is not None and len(cut.blocks) > 1:
                value = stacked(value, cut, mesh.size())
            made[p] = nn.Parameter(distribute_tensor(value, mesh, [placement]), requires_grad=p.requires_grad)
        parent, _, leaf = name.rpartition(".")
        module.get_submodule(parent)._parameters[leaf] = made[p]


def adopt(module: nn.Module, kind: type[nn.Module], **own: Any) -> None:
    """Make a module one of `kind` too, which computes; what it owns is not seen as a module or parameter of it."""
    module.__class__ = type(f"{kind.__name__}{type(module).__name__}", (kind, type(module)), {})
    module.__dict__.update(own)


def local(p: Tensor) -> Tensor:
    return p.to_local() if isinstance(p, DTensor) else p


class Local(nn.Module):
    """A module that every process computes as a whole, with parameters that are distributed tensors."""

    part: nn.Module

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return functional_call(self.part, {name: local(p) for name, p in self.named_parameters()}, arguments, options)


class Divided(nn.Module):
    """A module of which this process computes a part; the sum of all parts is what the module gives."""

    part: nn.Module
    cuts: dict[str, Cut]
    group: dist.ProcessGroup

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        if any(m._forward_hooks or m._forward_pre_hooks for m in self.modules() if m is not self):
            raise ValueError("a hook inside a layer that processes share would hear nothing: move it to the layer itself")
        own = {name: self.of_part(name, p) for name, p in self.named_parameters()}
        y = functional_call(self.part, own, (cast("Tensor", SumGradient.apply(x, self.group)),), options)
        return cast("Tensor", Sum.apply(y, self.group))

    def of_part(self, name: str, p: Tensor) -> Tensor:
        """What the part computes with instead of a parameter."""
        value, cut = local(p), self.cuts.get(name)
        if cut is not None and len(cut.blocks) > 1:
            blocks = value[0].split(cut.sizes(value.shape[1]))
            whole = (gathered(block, self.group) if i in cut.shared else block for i, block in enumerate(blocks))
            return torch.cat([*whole]) if cut.shared else value[0]
        if cut is not None:
            return value
        shared = cast("Tensor", SumGradient.apply(value, self.group))
        return shared / self.group.size() if name in AFTER_SUM else shared


def gathered(block: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Rows of all processes, one after the other; the gradient of each is the sum of theirs."""
    return cast("Tensor", Gather.apply(block, group)).flatten(0, 1)


class DividedMixer(Divided):
    """The same for a mixer, whose caches hold what this process's heads remember."""

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        if options.get("weights") is not None:
            raise ValueError("each process has the weights of its own heads alone: set tp=1 to read weights")
        return super().forward(x, **options)

    def cache_spec(self) -> CacheSpec:
        return cast("Mixer", self.part).cache_spec()

    def reset_parameters(self) -> None:
        """Begin again with the numbers of the first process, those that one process would draw."""
        with torch.device("cpu"):
            new = cast("Mixer", self).made_with()
        for name, p in new.named_parameters():
            cut = self.cuts.get(name)
            if cut is not None and len(cut.blocks) > 1:
                p.data = stacked(p.detach(), cut, self.group.size())
        copy_parameters(new, self)


def share_rows(mixer: Mixer, rows: RowShare) -> None:
    """Make a mixer take this process's rows of every sequence."""
    adopt(mixer, RowsMixer, rows=rows)


class RowsMixer(nn.Module):
    """A mixer of whose sequences this process has some rows."""

    rows: RowShare

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        given = sorted(name for name, value in options.items() if value is not None)
        if given:
            raise ValueError(
                f"{', '.join(given)} cannot be given where processes share a sequence: it takes plain batches of one length. "
                "Leave padding at the end and ignore its targets, and decode with cp=1"
            )
        mixer = cast("Mixer", self)
        x = mixer.prepare(x).x
        if x.shape[1] % 2:
            raise ValueError(f"{x.shape[1]} rows are not two pieces; give own_rows(x, mesh) of whole sequences")
        return mixer.mix_rows(x, self.rows)

    def new_cache(self, *arguments: Any, **options: Any) -> None:
        raise ValueError("a sequence that processes share has no cache: set cp=1 to decode")
