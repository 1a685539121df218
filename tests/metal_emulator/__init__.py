"""Runs Metal kernels on the CPU and checks what Metal's compiler would refuse."""

from .build import CompileError, EmulatorError
from .emulator import Library
from .trace import BufferTraffic, TraceReport

__all__ = ["BufferTraffic", "CompileError", "EmulatorError", "Library", "TraceReport"]
