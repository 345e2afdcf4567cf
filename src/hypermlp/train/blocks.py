"""Distributed parameters that hold blocks of heads, in checkpoints: there as a model of one process has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


class Blocks:
    """A distributed tensor (blocks, rows, …) that is (blocks · rows, …) in checkpoints, by the protocol of
    torch.distributed.checkpoint: this process has a chunk of it in every block."""

    def __init__(self, tensor: DTensor) -> None:
        sizes, begins = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        blocks, rows, *rest = tensor.shape
        self.shape, self.local = torch.Size((blocks * rows, *rest)), tensor.to_local()
        count = sizes[0] if self.local.numel() else 0
        self.begins = [torch.Size(((begins[0] + i) * rows + begins[1], *begins[2:])) for i in range(count)]

    def size(self) -> torch.Size:
        return self.shape

    def to(self, *arguments: Any, **options: Any) -> Blocks:
        """As Tensor.to."""
        moved = object.__new__(Blocks)
        moved.shape, moved.begins, moved.local = self.shape, self.begins, self.local.to(*arguments, **options)
        return moved

    def chunk(self, begin: torch.Size) -> Tensor:
        return self.local[self.begins.index(begin)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=begin, sizes=self.local.shape[1:]) for begin in self.begins]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]


class SavePlanner(DefaultSavePlanner):
    """Finds chunks in blocks too."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.chunk(index.offset) if isinstance(found, Blocks) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """Finds chunks in blocks too."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({}, metadata, is_coordinator)  # which would replace what it does not know by None
        self.state_dict = state_dict

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found: Any = self.state_dict[index.fqn]
        return found.chunk(index.offset) if isinstance(found, Blocks) else super().lookup_tensor(index)
