/* NCCL's own functions, for nccl.c and for tools that time them. What is declared here is its
 * published interface, version 2. */
#ifndef OH_NCCL_API_H
#define OH_NCCL_API_H

#include "device/nccl/nccl.h"

/* X(exported name, parameters); all return 0 for success. */
#define OH_NCCL_FUNCTIONS(X)                                                                       \
    X(ncclGetVersion, (int *))                                                                     \
    X(ncclGetUniqueId, (oh_nccl_id *))                                                             \
    X(ncclCommInitRank, (void **, int, oh_nccl_id, int))                                           \
    X(ncclAllReduce, (const void *, void *, size_t, int, int, void *, onehop_stream))              \
    X(ncclReduceScatter, (const void *, void *, size_t, int, int, void *, onehop_stream))          \
    X(ncclAllGather, (const void *, void *, size_t, int, void *, onehop_stream))                   \
    X(ncclCommDestroy, (void *))                                                                   \
    X(ncclCommAbort, (void *))

/* Of 2.27 and later. */
#define OH_NCCL_WINDOW_FUNCTIONS(X)                                                                \
    X(ncclMemAlloc, (void **, size_t))                                                             \
    X(ncclMemFree, (void *))                                                                       \
    X(ncclCommWindowRegister, (void *, void *, size_t, void **, int))                              \
    X(ncclCommWindowDeregister, (void *, void *))

typedef struct oh_nccl_table {
#define OH_NCCL_MEMBER(name, parameters) int(*name) parameters;
    OH_NCCL_FUNCTIONS(OH_NCCL_MEMBER)
    OH_NCCL_WINDOW_FUNCTIONS(OH_NCCL_MEMBER)
#undef OH_NCCL_MEMBER
    const char *(*ncclGetErrorString)(int);
    bool windows;     /* it has all functions of windows */
    char version[32]; /* "2.28.9" */
} oh_nccl_table;

/* Valid once oh_nccl_open has succeeded. */
extern oh_nccl_table oh_nccl;

/* OK for 0, else DRIVER with NCCL's own text. */
onehop_result oh_nccl_check(int result, const char *call);

enum {
    OH_NCCL_SUM = 0
};

/* NCCL's number for a data type. */
int oh_nccl_type(onehop_dtype dtype);

#endif
