"""The metrics: values, reset, and what two real processes reduce them to. Doctests run from the module itself."""

import socket
import time

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


def test_calling_a_metric_counts_as_updating_it():
    """`self.log(name, metric(value))`: the call returns the batch's own value, and the sum goes on."""
    interventions, budget_use, share = DecisionCount(), BudgetUse(), Bf16Share()
    assert [interventions(2).item(), interventions(1).item()] == [2, 1]
    assert interventions.compute() == 3
    assert [budget_use(0, 2).item(), budget_use(1, 2).item()] == [0, 0.5]
    assert budget_use.compute() == 0.25
    assert [share(torch.tensor([[low, 40.0, 0.0]])).item() for low in (0.0, 40.0)] == [1, 0.5]
    assert share.compute() == 80 / 120


def test_the_share_counts_low_and_bf16_work_of_all_units():
    share, fallback = Bf16Share(), FallbackCalls()
    for metric in (share, fallback):
        metric.update(torch.zeros(2, 3))
        assert metric.compute() == 0  # no work yet
        metric.update(torch.tensor([[0.0, 30.0, 2.0], [50.0, 20.0, 0.0]]))
    assert share.compute() == 50 / 100
    assert fallback.compute() == 2


def _rank(rank, port, folder):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.save(values(updated(rank)), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_count_decisions_once_and_add_up_work(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = mp.spawn(_rank, args=(port, str(tmp_path)), nprocs=2, join=False)
    try:
        deadline = time.monotonic() + 60
        while not ranks.join(timeout=1):  # raises what a rank raised
            assert time.monotonic() < deadline, "the two processes did not end within 60 s"
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()
    one, two = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert one == two
    assert one == {
        "max": 4.0,
        "interventions": 3,
        "budget_use": 3 / 2 / 4,
        "share": 40 / 360,  # 160 low, then 160 low and 40 bf16
        "fallback": 3,
    }
