"""Some entries of ∂L/∂W = (∂L/∂y)ᵀ x, without the others: for one product, or for all products of a backward pass."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

#: The most bytes of x, ∂L/∂y and their products' terms that `FlatProducts` holds.
KEPT_BYTES = 2**28
#: The most cached index sets: each belongs to a set of layers that are computed together.
KNOWN = 64


class EntriesOfProduct:
    """Some entries of a product ``leftᵀ right``, computed without the others if that is faster.

    Args:
        shape: ``(rows, columns)`` of the product.
        local: the entries' numbers ``(s,)`` in row-major order, sorted.
        dtype: the dtype in which scattered entries are summed.
    """

    def __init__(self, shape: torch.Size, local: Tensor, dtype: torch.dtype = torch.float32) -> None:
        rows, columns = local // shape[1], local % shape[1]
        self._rows, row = torch.unique(rows, return_inverse=True)
        self._columns, column = torch.unique(columns, return_inverse=True)
        self._at = row * len(self._columns) + column
        self._pattern: Tensor | None = None
        # The cost in multiplications per row of left: regions of skills lie in few rows and columns, random ones anywhere.
        block = len(self._rows) * len(self._columns) + 50 * (len(self._rows) + len(self._columns))
        if local.device.type == "cpu" and block > 25 * sum(shape) + 7 * len(local):
            starts = torch.searchsorted(rows, torch.arange(shape[0] + 1, device="cpu"))
            zeros = torch.zeros(len(local), dtype=dtype, device="cpu")
            with warnings.catch_warnings():  # it warns of being in beta
                warnings.simplefilter("ignore")
                self._pattern = torch.sparse_csr_tensor(starts, columns, zeros, shape, check_invariants=True)

    def of(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the entries ``(s,)`` for ``left (N, rows)`` and ``right (N, columns)``."""
        if self._pattern is not None:
            left, right = (each.to(self._pattern.dtype) for each in (left, right))
            product: Tensor = torch.sparse.sampled_addmm(self._pattern, left.t(), right, beta=0)
            return product.values()
        if left.element_size() < 4:  # index_select is slow on these
            block = left.t()[self._rows] @ right.t()[self._columns].t()
        else:
            block = left.index_select(1, self._rows).t() @ right.index_select(1, self._columns)
        return block.view(-1).index_select(0, self._at)


@dataclass
class _Pass:
    """The products of a backward pass so far."""

    kept: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    bytes: int = 0
    sums: Tensor | None = None


class FlatProducts:
    """Entries of many products ``leftᵀ right``, and column sums of ``left``, in a few operations for any number of products.

    With the factors side by side, and a column of ones before the right ones, an entry is the sum over the rows of
    ``LEFT[:, r] · RIGHT[:, c]``. Factors are kept until `sums` is called or `KEPT_BYTES` are reached; a product that needs
    more by itself is refused.

    Args:
        places: for each product, the ``rows (s,)`` and ``columns (s,)`` of its entries, where column −1 stands for the sum of a
            column of ``left``.
        dtype: the dtype in which entries are summed.
    """

    def __init__(self, places: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> None:
        self._places, self._dtype = places, dtype
        sizes = [len(rows) for rows, _ in places]
        self._size = sum(sizes)
        self._numbers = torch.split(torch.arange(self._size, device=places[0][0].device), sizes)
        self._passes: dict[int, _Pass] = {}  # by backward pass: checkpoints begin one pass within another
        self._indices: dict[tuple[tuple[int, int], ...], tuple[Tensor, Tensor, Tensor | None]] = {}
        self._ones: dict[int, Tensor] = {}

    def add(self, number: int, left: Tensor, right: Tensor) -> bool:
        """Add ``left (N, rows)`` and ``right (N, columns)`` of a product in a backward pass, unless it is too large."""
        bytes_ = left.nbytes + right.nbytes + 8 * len(left) * len(self._numbers[number])
        if bytes_ > KEPT_BYTES:
            return False
        current = self._passes.setdefault(torch._C._current_graph_task_id(), _Pass())
        if current.bytes + bytes_ > KEPT_BYTES:
            current.sums = self._computed(current)
            current.bytes = 0
        current.kept.append((number, left, right))
        current.bytes += bytes_
        return True

    def forget_unread(self) -> None:
        """Forget passes that ended without a call of `sums`: passes for other gradients, or after an error."""
        if self._passes and torch._C._current_graph_task_id() == -1:  # no backward pass is going on
            self._passes.clear()

    def sums(self) -> Tensor | None:
        """Return the entries ``(s,)`` of all products of this backward pass, by product; ``None`` if there was none."""
        task = torch._C._current_graph_task_id()
        found = self._passes.pop(task, None)
        for other in [other for other in self._passes if other > task]:  # ended within this one, without a call
            del self._passes[other]
        return None if found is None else self._computed(found)

    def _computed(self, of: _Pass) -> Tensor | None:
        sums, kept = of.sums, of.kept
        of.kept = []
        while kept:
            # A product that repeats, or has another number of rows, waits for the next turn.
            turn, later, seen = [], [], set()
            for each in kept:
                number, left, _ = each
                if number in seen or len(left) != len(kept[0][1]):
                    later.append(each)
                else:
                    seen.add(number)
                    turn.append(each)
            sums, kept = self._added(sums, sorted(turn, key=lambda each: each[0])), later
        return sums

    def _added(self, sums: Tensor | None, turn: list[tuple[int, Tensor, Tensor]]) -> Tensor:
        """Return ``sums`` plus the entries of products with equal numbers of rows, each product once."""
        rights: dict[tuple[object, ...], int] = {}
        distinct, key = [], []
        for number, _, right in turn:
            memory = (right.data_ptr(), right.shape, right.stride(), right.dtype)  # query, key and value share one
            if memory not in rights:
                rights[memory] = len(rights)
                distinct.append(right)
            key.append((number, rights[memory]))
        lefts = [left for _, left, _ in turn]
        if tuple(key) not in self._indices:
            if len(self._indices) >= KNOWN:  # routed experts differ from pass to pass
                self._indices.clear()
            self._indices[tuple(key)] = self._index(key, lefts, distinct)
        rows, columns, where = self._indices[tuple(key)]
        count = len(lefts[0])
        if count not in self._ones:
            self._ones = {count: lefts[0].new_ones(count, 1, dtype=distinct[0].dtype)}
        left = torch.cat(lefts, 1).index_select(1, rows)
        right = torch.cat([self._ones[count], *distinct], 1).index_select(1, columns)
        # In half precision each product would be rounded before the sum.
        entries = left.to(self._dtype).mul_(right).sum(0)
        if where is None:
            return entries if sums is None else sums.add_(entries)
        return (entries.new_zeros(self._size) if sums is None else sums).index_add_(0, where, entries)

    def _index(
        self, key: list[tuple[int, int]], lefts: list[Tensor], distinct: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return rows and columns of the entries side by side, and the entries' numbers; ``None`` for all entries."""
        starts = [0]
        for left in lefts:
            starts.append(starts[-1] + left.shape[1])
        begins = [1]  # after the ones
        for right in distinct:
            begins.append(begins[-1] + right.shape[1])
        rows, columns = [], []
        for (number, of), start in zip(key, starts, strict=False):
            r, c = self._places[number]
            rows.append(r + start)
            columns.append(torch.where(c < 0, 0, c + begins[of]))
        where = torch.cat([self._numbers[number] for number, _ in key]) if len(key) < len(self._places) else None
        return torch.cat(rows), torch.cat(columns), where
