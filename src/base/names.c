/* Words for the public enums, and the version. */
#include "base/base.h"

int onehop_version(void) {
    return ONEHOP_VERSION;
}

const char *onehop_algorithm_name(onehop_algorithm algorithm) {
    switch ((int)algorithm) {
    case ONEHOP_ALGORITHM_AUTO:
        return "auto";
    case ONEHOP_1SHOT_PUSH:
        return "1shot_push";
    case ONEHOP_2SHOT_PUSH:
        return "2shot_push";
    case ONEHOP_1SHOT_PULL:
        return "1shot_pull";
    case ONEHOP_2SHOT_PULL:
        return "2shot_pull";
    case ONEHOP_NCCL:
        return "nccl";
    case ONEHOP_HOST_1SHOT:
        return "host_1shot";
    case ONEHOP_HOST_2SHOT:
        return "host_2shot";
    case ONEHOP_LOCAL_COPY:
        return "local_copy";
    case ONEHOP_SCATTER_PUSH:
        return "scatter_push";
    case ONEHOP_GATHER_LL:
        return "gather_ll";
    case ONEHOP_GATHER_PUSH:
        return "gather_push";
    case ONEHOP_HOST_SCATTER:
        return "host_scatter";
    case ONEHOP_HOST_GATHER:
        return "host_gather";
    default:
        return "unknown";
    }
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

onehop_collective oh_collective_of(onehop_algorithm a) {
    switch ((int)a) {
    case ONEHOP_SCATTER_PUSH:
    case ONEHOP_HOST_SCATTER:
        return ONEHOP_REDUCE_SCATTER;
    case ONEHOP_GATHER_LL:
    case ONEHOP_GATHER_PUSH:
    case ONEHOP_HOST_GATHER:
        return ONEHOP_ALL_GATHER;
    default:
        return ONEHOP_ALL_REDUCE;
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
