/* See function.h. */
#include "jit/function.h"

#include "jit/jit.h"

#include <stdio.h>

onehop_result oh_jit_kernel(oh_device *device, uint32_t cross, int kernel,
                            const onehop_expression_config *op, oh_function *out) {
    size_t count;
    const oh_kernel *list = oh_kernel_list(&count);
    oh_program program;
    onehop_result result = oh_program_make(kernel, op, &program);
    if (!result)
        result = cross ? oh_jit_try(&program, cross)
                       : oh_jit_build(device, &program, &list[kernel], out);
    oh_program_free(&program);
    if (result == ONEHOP_ERR_INTERNAL && op) /* local memory, or too many registers */
        result = oh_error(ONEHOP_ERR_UNSUPPORTED, "the expression must become simpler: %s",
                          onehop_last_error());
    return result;
}

onehop_result oh_jit_function(oh_device *device, int kernel, oh_function *out) {
    size_t count;
    const oh_kernel *k = &oh_kernel_list(&count)[kernel];
    char reason[200];
    onehop_result result = device->ops->load(device, k, 1, out);
    if (result != ONEHOP_ERR_UNSUPPORTED || device->ops->kind != ONEHOP_DEVICE_CUDA) return result;
    snprintf(reason, sizeof reason, "%s", onehop_last_error());
    result = oh_jit_kernel(device, 0, kernel, NULL, out);
    return result ? oh_error(result, "%s; nor can it be built: %s", reason, onehop_last_error())
                  : ONEHOP_OK;
}
