"""The page pool: which KV pages are free. Plain Python over integers; the tensors are elsewhere."""

from __future__ import annotations

import heapq


class PagePool:
    """Pages 0 .. total - 1. Low numbers are handed out first, so that untouched memory stays untouched."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total))
        self._is_free = [True] * total

    @property
    def free(self) -> int:
        """How many pages are free."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` free pages; the caller has made sure that there are so many."""
        if count > len(self._free):
            raise ValueError(f"{count} pages asked of {len(self._free)} free ones")
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def give_back(self, pages: list[int]) -> None:
        """Pages nobody reads any more. Giving a page back twice is a bug and raises."""
        for page in pages:
            if self._is_free[page]:
                raise ValueError(f"page {page} is already free")
            self._is_free[page] = True
            heapq.heappush(self._free, page)
