"""FP8 and INT8 training for PyTorch Lightning that recovers only the layers in trouble, for a few steps, to bf16."""

from .callback import GNMRCallback
from .controller import GNMRConfig, GNMRController
from .precision import GNMRPrecision

__all__ = ["GNMRCallback", "GNMRConfig", "GNMRController", "GNMRPrecision"]
