/* Kernels by their number, ready to launch. */
#ifndef OH_FUNCTION_H
#define OH_FUNCTION_H

#include "device/device.h"

/* Of the library's image, or built at run time if that has no code for this device. */
onehop_result oh_jit_function(oh_device *device, int kernel, oh_function *out);

/* Built at run time, with the expression if `op`, which has been checked, is not NULL. With `cross`
 * it is compiled for that architecture, to see that it can be, and `out` stays as it is. */
onehop_result oh_jit_kernel(oh_device *device, uint32_t cross, int kernel,
                            const onehop_expression_config *op, oh_function *out);

#endif
