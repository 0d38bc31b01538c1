/* Words for the public enums but that of algorithms, and the version. */
#include "base/base.h"

int onehop_version(void) {
    return ONEHOP_VERSION;
}

const char *onehop_collective_name(onehop_collective collective) {
    switch ((int)collective) {
    case ONEHOP_ALL_REDUCE:
        return "all_reduce";
    case ONEHOP_REDUCE_SCATTER:
        return "reduce_scatter";
    case ONEHOP_ALL_GATHER:
        return "all_gather";
    default:
        return "unknown";
    }
}

const char *onehop_source_name(onehop_source source) {
    switch ((int)source) {
    case ONEHOP_SOURCE_NONE:
        return "none";
    case ONEHOP_SOURCE_WORKSPACE:
        return "workspace";
    case ONEHOP_SOURCE_GRAPH:
        return "graph";
    case ONEHOP_SOURCE_MULTICAST:
        return "multicast";
    default:
        return "unknown";
    }
}

const char *onehop_dtype_name(onehop_dtype dtype) {
    switch ((int)dtype) {
    case ONEHOP_FLOAT32:
        return "float32";
    case ONEHOP_FLOAT16:
        return "float16";
    case ONEHOP_BFLOAT16:
        return "bfloat16";
    default:
        return "unknown";
    }
}

const char *onehop_op_name(onehop_op op) {
    return op == ONEHOP_SUM ? "sum" : "unknown";
}

size_t onehop_dtype_bytes(onehop_dtype dtype) {
    switch ((int)dtype) {
    case ONEHOP_FLOAT32:
        return 4;
    case ONEHOP_FLOAT16:
    case ONEHOP_BFLOAT16:
        return 2;
    default:
        return 0;
    }
}
