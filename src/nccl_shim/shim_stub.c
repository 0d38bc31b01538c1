/* Where the stubs of nccl_stubs.S jump to, which ask here. */
#include "nccl_shim/shim.h"

enum {
    CLASS_FORWARD,
    CLASS_COMM,
    CLASS_WORK,
    CLASS_OURS
};
static const unsigned char classes[] = {
#define NCCL_FUNCTION(name, since, class) CLASS_##class,
#include "nccl_shim/functions.def"
#undef NCCL_FUNCTION
};

void *oh_shim_target(unsigned index, const void *caller) {
    if (classes[index] == CLASS_WORK && !oh_shim_inside(caller)) {
        const int result = oh_shim_group_open();
        if (result) return oh_shim_answer(result);
        oh_shim_count_forwarded(OH_SHIM_OTHER);
    }
    return oh_shim_real((oh_shim_function)index);
}
