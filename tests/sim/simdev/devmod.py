"""The functions and classes that torch.cuda, torch.xpu and torch.npu have in common, over the simulated devices."""

from __future__ import annotations

import types
from typing import Any

import torch

CAPABILITY = (8, 6)  # an NVIDIA generation with bf16 and without fp8 arithmetic
PROPERTIES = {"major": CAPABILITY[0], "minor": CAPABILITY[1], "multi_processor_count": 1, "gcnArchName": ""}
XPU_PROPERTIES = {"has_fp16": True, "has_fp64": True, "has_bfloat16_conversions": True, "is_integrated_gpu": False}


class DeviceApi:
    """Builds the contents of the module `torch.<kind>`."""

    def __init__(self, native: Any, kind: str) -> None:
        self.native = native
        self.kind = kind

    def index(self, device: Any = None) -> int:
        """The number of a device given as None (the current one), number, name or torch.device."""
        if device is None:
            return int(self.native.current_device())
        if isinstance(device, int):
            return device if device >= 0 else int(self.native.current_device())
        index = torch.device(device).index
        return int(self.native.current_device()) if index is None else index

    def namespace(self) -> dict[str, Any]:
        return {**self._devices(), **self._memory(), **self._random(), **self._streams()}

    def _devices(self) -> dict[str, Any]:
        native, index = self.native, self.index

        def properties(device: Any = None) -> types.SimpleNamespace:
            return types.SimpleNamespace(
                name=f"Simulated {self.kind.upper()}",
                total_memory=native.memory(index(device))["capacity"],
                **(XPU_PROPERTIES if self.kind == "xpu" else PROPERTIES),
            )

        class device:
            """Context manager: another current device, restored at exit. None changes nothing."""

            def __init__(self, device: Any) -> None:
                self.idx = -1 if device is None else index(device)

            def __enter__(self) -> None:
                self.prev_idx = native.exchange_device(self.idx)

            def __exit__(self, *exception: object) -> None:
                native.restore_device(self.prev_idx)

        return {
            "device": device,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "init": lambda: None,
            "_lazy_init": lambda: None,
            "_lazy_call": lambda function, **_: function(),
            "_is_compiled": lambda: True,
            "_is_in_bad_fork": lambda: False,
            "device_count": native.device_count,
            "current_device": native.current_device,
            "set_device": lambda device: native.set_device(index(device)),
            "synchronize": lambda device=None: native.synchronize(index(device)),
            "can_device_access_peer": lambda device, peer_device: native.peer(index(device), index(peer_device)),
            "get_device_name": lambda device=None: f"Simulated {self.kind.upper()} {index(device)}",
            "get_device_capability": lambda device=None: CAPABILITY,
            "get_device_properties": properties,
            "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
            "is_bf16_supported": lambda including_emulation=True: True,
            "ipc_collect": lambda: None,
            "_sleep": lambda cycles: None,  # queued copies are late anyway
        }

    def _memory(self) -> dict[str, Any]:
        native, index = self.native, self.index

        def mem_get_info(device: Any = None) -> tuple[int, int]:
            i = index(device)
            return native.free_bytes(i), native.memory(i)["capacity"]

        def reading(name: str) -> Any:
            return lambda device=None: native.memory(index(device))[name]

        return {
            "mem_get_info": mem_get_info,
            "memory_stats": lambda device=None: torch.accelerator.memory_stats(index(device)),
            "memory_stats_as_nested_dict": lambda device=None: torch.accelerator.memory_stats(index(device)),
            "memory_allocated": reading("allocated"),
            "max_memory_allocated": reading("peak"),
            "memory_reserved": reading("reserved"),
            "max_memory_reserved": reading("peak_reserved"),
            "reset_peak_memory_stats": lambda device=None: native.reset_peak(index(device)),
            "empty_cache": native.empty_cache,
            "get_allocator_backend": lambda: "native",
            "memory_summary": lambda device=None, abbreviated=False: f"simulated: {native.memory(index(device))}",
        }

    def _random(self) -> dict[str, Any]:
        native, index = self.native, self.index

        def manual_seed(seed: int) -> None:
            native.default_generator(index()).manual_seed(seed)

        def manual_seed_all(seed: int) -> None:
            for i in range(native.device_count()):
                native.default_generator(i).manual_seed(seed)

        def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
            native.default_generator(index(device)).set_state(state)

        return {
            "manual_seed": manual_seed,
            "manual_seed_all": manual_seed_all,
            "get_rng_state": lambda device=None: native.default_generator(index(device)).get_state(),
            "set_rng_state": set_rng_state,
        }

    def _streams(self) -> dict[str, Any]:
        native, index, kind = self.native, self.index, self.kind

        class Stream(torch.Stream):
            def __new__(cls, device: Any = None, priority: int = 0, **identity: int) -> Any:
                if identity:  # stream_id, device_index, device_type: an existing stream
                    return super().__new__(cls, priority=priority, **identity)
                return super().__new__(cls, device=torch.device(kind, index(device)), priority=priority)

        def wrap(stream: torch.Stream) -> Stream:
            return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)

        class EventType(type):
            def __instancecheck__(cls, instance: object) -> bool:
                return isinstance(instance, torch.Event)

        class Event(metaclass=EventType):
            """Makes plain torch.Event objects: torch.Event.elapsed_time accepts no subclass."""

            def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
                return torch.Event(device=kind, enable_timing=enable_timing)

        class StreamContext:
            """Context manager: another current stream and its device, both restored at exit. None changes nothing."""

            def __init__(self, stream: torch.Stream | None) -> None:
                self.stream = stream

            def __enter__(self) -> None:
                if self.stream is not None:
                    self.previous_device = native.exchange_device(self.stream.device.index)
                    self.previous = torch.accelerator.current_stream(self.stream.device)
                    torch.accelerator.set_stream(self.stream)

            def __exit__(self, *exception: object) -> None:
                if self.stream is not None:
                    torch.accelerator.set_stream(self.previous)
                    native.restore_device(self.previous_device)

        def default_stream(device: Any = None) -> Stream:
            i = index(device)
            current = torch.accelerator.current_stream(i)
            return Stream(stream_id=i, device_index=i, device_type=current.device_type)

        return {
            "Stream": Stream,
            "Event": Event,
            "StreamContext": StreamContext,
            "stream": StreamContext,
            "current_stream": lambda device=None: wrap(torch.accelerator.current_stream(index(device))),
            "default_stream": default_stream,
            "set_stream": torch.accelerator.set_stream,
        }
