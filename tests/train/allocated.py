"""What PyTorch's allocator gave out while a profile was taken."""

from torch.profiler import profile


def most_allocated(run: profile) -> int:
    """Bytes at the worst moment."""
    live = most = 0
    for event in run.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most
