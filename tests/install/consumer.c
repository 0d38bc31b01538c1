/* A user of the installed library, in the common subset of C99 and C++11: compiled by
 * check_install.py with every standard the header promises, linked through pkg-config and through
 * the CMake package. */
#include <onehop.h>

#include <stdio.h>

int main(void) {
    if (onehop_version() != ONEHOP_VERSION) {
        printf("header %d, library %d\n", ONEHOP_VERSION, onehop_version());
        return 1;
    }
    if (onehop_dtype_bytes(ONEHOP_FLOAT32) != 4 || onehop_result_name(ONEHOP_OK)[0] != 'O')
        return 1;
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    onehop_context *context = NULL;
    config.world_size = 1;
    config.name = "install";
    config.device.kind = ONEHOP_DEVICE_HOST;
    onehop_result result = onehop_create(&config, &context);
    if (result != ONEHOP_OK) {
        printf("%s: %s\n", onehop_result_name(result), onehop_last_error());
        return 1;
    }
    float in[3] = {1, 2, 3}, out[3] = {0, 0, 0};
    result = onehop_all_reduce(context, in, out, 3, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL);
    onehop_destroy(context);
    return result != ONEHOP_OK || out[0] != 1 || out[2] != 3;
}
