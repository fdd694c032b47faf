"""Where and with what something was measured."""

import os
import platform
import subprocess
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

__all__ = ["Environment", "after_load", "environment_of"]

GPU_QUERIES = ("driver_version", "clocks.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")


@dataclass(frozen=True)
class Environment:
    """Versions, machine and device.

    Args:
        measured_at: Time in UTC.
        commit: Of this project, with "+" if files were changed since; "" outside of a git repository.
        version: Of this project, "" if it is not installed.
        torch: Version.
        python: Version.
        numpy: Version.
        system: Operating system.
        processor: Name of the CPU.
        cpu_cores: Number of cores that this process may use.
        accelerator: Name of the GPU; "" on the CPU.
        cuda: Version of CUDA, "" on the CPU.
        gpu_state: Driver, clocks, power and temperature right after the last run, as nvidia-smi tells them; "" on the
            CPU.
        matmul_precision: What torch allows matrix products in float32 to be computed in.
    """

    measured_at: str
    commit: str
    version: str
    torch: str
    python: str
    numpy: str
    system: str
    processor: str
    cpu_cores: int
    accelerator: str
    cuda: str
    gpu_state: str
    matmul_precision: str

    def __str__(self) -> str:
        device = self.accelerator or f"{self.processor}, {self.cpu_cores} cores"
        return f"{device}; torch {self.torch}, Python {self.python}, {self.system}"


def environment_of(device: torch.device) -> Environment:
    """Collect versions, machine and device.

    Args:
        device: Where is measured.

    Returns:
        An ``Environment``.
    """
    is_cuda = device.type == "cuda"
    return Environment(
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=_commit(),
        version=_version(),
        torch=torch.__version__,
        python=platform.python_version(),
        numpy=np.__version__,
        system=f"{platform.system()} {platform.machine()}",
        processor=_processor(),
        cpu_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        accelerator=torch.cuda.get_device_name(device) if is_cuda else "",
        cuda=torch.version.cuda or "" if is_cuda else "",
        gpu_state="",
        matmul_precision=torch.get_float32_matmul_precision(),
    )


def after_load(environment: Environment, device: torch.device) -> Environment:
    """Note clocks, power and temperature anew: before, the GPU may have rested.

    Args:
        environment: As it was before.
        device: Where something has just run.

    Returns:
        The environment with the present ``gpu_state``.
    """
    return replace(environment, gpu_state=_gpu_state(device)) if device.type == "cuda" else environment


def _version() -> str:
    try:
        return metadata.version("attention-side-by-side")
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    folder = Path(__file__).parent
    if not _output_of("git", "-C", str(folder), "ls-files", "--error-unmatch", Path(__file__).name):
        return ""  # installed in the midst of a repository that is not this project's
    commit = _output_of("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    changed = _output_of("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+" if commit and changed else commit


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpu_state(device: torch.device) -> str:
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    values = _output_of("nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(GPU_QUERIES)}", "--format=csv,noheader")
    return ", ".join(f"{name} {value}" for name, value in zip(GPU_QUERIES, values.split(", "), strict=False) if value)


def _output_of(*command: str) -> str:
    """Run a command; "" if there is no such command, or if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
