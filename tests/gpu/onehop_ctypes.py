"""What the scripts of this folder need of onehop.h, through ctypes. Names are those of the header, against which
tests/test_onehop_ctypes.py holds them."""

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p

ONEHOP_OK = 0
ONEHOP_FLOAT32 = 1
ONEHOP_FLOAT16 = 2
ONEHOP_BFLOAT16 = 3
ONEHOP_SUM = 1
ONEHOP_DEVICE_CUDA = 1
ONEHOP_DEVICE_HOST = 2
ONEHOP_1SHOT_PULL = 3
ONEHOP_2SHOT_PULL = 4
ONEHOP_LOCAL_COPY = 8
ONEHOP_SOURCE_GRAPH = 2
ONEHOP_FLAG_SHARE_GPU = 2


class onehop_device(Structure):
    _fields_ = [("kind", c_int), ("ordinal", c_int)]


class onehop_config(Structure):
    _fields_ = [("struct_size", c_size_t), ("group", c_void_p), ("rank", c_int), ("world_size", c_int),
                ("name", c_char_p), ("device", onehop_device), ("max_bytes", c_size_t), ("push_bytes", c_size_t),
                ("pull_bytes", c_size_t), ("max_blocks", c_uint32), ("max_registrations", c_uint32), ("timeout_ms", c_uint32),
                ("init_timeout_ms", c_uint32), ("flags", c_uint32), ("reserved", c_uint32)]


class onehop_call(Structure):
    _fields_ = [("struct_size", c_size_t), ("algorithm", c_int), ("source", c_int), ("blocks", c_uint32),
                ("threads", c_uint32), ("registration", c_uint32), ("reserved", c_uint32), ("prefetch", c_void_p),
                ("prefetch_bytes", c_size_t)]


class onehop_stats(Structure):
    _fields_ = [("calls", c_uint64), ("bytes", c_uint64), ("calls_by", c_uint64 * 16), ("symmetric_bytes", c_uint64),
                ("local_bytes", c_uint64), ("host_bytes", c_uint64), ("registrations_used", c_uint32),
                ("registrations_total", c_uint32), ("push_bytes", c_uint64), ("pull_bytes", c_uint64),
                ("registrations_direct", c_uint64), ("registrations_staged", c_uint64), ("reserved", c_uint64 * 4)]


class Failure(Exception):
    pass


def configured(struct, **fields):
    """A struct of the header with struct_size set."""
    return struct(struct_size=ctypes.sizeof(struct), **fields)


def load(path):
    """The library; a call that fails raises Failure with the library's sentence."""
    library = ctypes.CDLL(path)
    library.onehop_last_error.restype = c_char_p

    def check(result, function, _):
        if result != ONEHOP_OK:
            raise Failure(f"{function.__name__}: {library.onehop_last_error().decode()} ({result})")

    context, stream = c_void_p, c_void_p
    for name, arguments in {
        "onehop_create": [POINTER(onehop_config), POINTER(context)],
        "onehop_all_reduce": [context, c_void_p, c_void_p, c_size_t, c_int, c_int, POINTER(onehop_call), stream],
        "onehop_capture_begin": [context],
        "onehop_capture_end": [context],
        "onehop_synchronize": [context, stream],
        "onehop_get_stats": [context, POINTER(onehop_stats)],
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype, function.errcheck = arguments, c_int, check
    library.onehop_destroy.argtypes, library.onehop_destroy.restype = [context], None
    return library
