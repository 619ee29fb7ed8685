"""The example of a backend of one's own: its rounding, and that the command of its docstring trains."""

import pytest
import torch

from examples import custom_backend


def test_weights_become_the_nearest_powers_of_two_by_ratio():
    weight = torch.tensor([[0.0, 1.0, -1.0, 1.4, 1.42, 3.0, -0.3, 1e-3, float("inf")]])
    expected = torch.tensor([[0.0, 1.0, -1.0, 1.0, 2.0, 4.0, -0.25, 2.0**-10, float("inf")]])
    assert torch.equal(custom_backend._rounded(weight), expected)
    assert custom_backend._rounded(torch.tensor([[float("nan")]])).isnan().all()


def test_the_example_learns_in_its_own_backend(capsys: pytest.CaptureFixture) -> None:
    losses = custom_backend.main(max_steps=60)
    assert len(losses.losses) == 60
    assert losses.losses[0] == pytest.approx(5.55, abs=0.2)  # ln 256
    assert sum(losses.losses[-10:]) / 10 < 4.2
    assert losses.bf16_share <= 1 / 6  # one unit at once; the largest has a sixth of the FLOPs
    assert "powers_of_two: loss 5." in capsys.readouterr().out
