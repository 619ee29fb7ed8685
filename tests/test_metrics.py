"""The metrics: values, reset, and what two real processes reduce them to. Doctests run from the module itself."""

import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gnmr_lightning.metrics import Bf16Share, BudgetUse, DecisionCount, FallbackCalls, MaxRatio


def updated(rank: int) -> dict:
    """Metrics after what one rank saw: equal decisions, other work and, through a tie in rounding, another maximum."""
    metrics = {
        "max": MaxRatio(),
        "interventions": DecisionCount(),
        "budget_use": BudgetUse(),
        "share": Bf16Share(),
        "fallback": FallbackCalls(),
    }
    metrics["max"].update(torch.tensor([1.0, 3.0 + rank]))
    metrics["interventions"].update(2)
    metrics["interventions"].update(1)
    metrics["budget_use"].update(3, 2, steps=3)
    metrics["budget_use"].update(0, 2)
    metrics["share"].update(torch.tensor([[100.0, 0.0, 0.0], [60.0, 40.0 * rank, 1.0 + rank]]))
    metrics["fallback"].update(torch.tensor([[100.0, 0.0, 0.0], [60.0, 40.0 * rank, 1.0 + rank]]))
    return metrics


def values(metrics: dict) -> dict:
    return {name: metric.compute().item() for name, metric in metrics.items()}


def test_values_of_one_process():
    assert values(updated(1)) == {
        "max": 4.0,
        "interventions": 3,
        "budget_use": 3 / 2 / 4,
        "share": 40 / 200,
        "fallback": 2,
    }


def test_reset_and_nothing_seen():
    metrics = updated(1)
    for metric in metrics.values():
        metric.reset()
    fresh = {"max": 0.0, "interventions": 0, "budget_use": 0.0, "share": 0.0, "fallback": 0}
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        assert values(metrics) == fresh


def test_an_empty_vector_and_infinity():
    metric = MaxRatio()
    metric.update(torch.empty(0))
    assert metric.compute() == 0
    metric.update(torch.tensor([1.0, torch.inf]))
    assert metric.compute() == torch.inf


def _rank(rank, port, folder):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.save(values(updated(rank)), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_count_decisions_once_and_add_up_work(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, args=(port, str(tmp_path)), nprocs=2)
    one, two = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert one == two
    assert one == {
        "max": 4.0,
        "interventions": 3,
        "budget_use": 3 / 2 / 4,
        "share": 40 / 360,  # 160 low, then 160 low and 40 bf16
        "fallback": 3,
    }
