/* Shared by the files of the host device. The functions are rows of its oh_device_ops. */
#ifndef OH_HOST_DEVICE_H
#define OH_HOST_DEVICE_H

#include "device/device.h"

/* Largest argument block of a kernel: a stream keeps a copy of it in each entry of its ring. */
#define OH_HOST_ARGS_MAX 1024

/* host_memory.c */
onehop_result oh_host_mem_create(oh_device *device, size_t bytes, uint32_t kinds, oh_mem *out);
onehop_result oh_host_mem_export(oh_device *device, const oh_mem *memory, oh_mem_handle *out,
                                 int *fd_out);
onehop_result oh_host_mem_import(oh_device *device, const oh_mem_handle *handle, int fd,
                                 oh_mem *out);
void oh_host_mem_release(oh_device *device, oh_mem *memory);
/* A record of addresses of which mem_release unmaps whatever lies there. */
onehop_result oh_host_mem_adopt(void *ptr, size_t bytes, oh_mem *out);

/* host_multicast.c */
onehop_result oh_host_multicast_create(oh_device *device, size_t bytes, int ranks, uint32_t kind,
                                       oh_multicast *out, oh_mem_handle *handle_out, int *fd_out);
onehop_result oh_host_multicast_join(oh_device *device, const oh_mem_handle *handle, int fd,
                                     oh_multicast *multicast);
onehop_result oh_host_multicast_bind(oh_device *device, const oh_mem *own, oh_multicast *multicast);
onehop_result oh_host_multicast_map(oh_device *device, const oh_mem *buffers, int ranks,
                                    oh_multicast *multicast);
void oh_host_multicast_release(oh_device *device, oh_multicast *multicast);

/* host_foreign.c */
onehop_result oh_host_foreign_find(oh_device *device, const oh_range *ranges, size_t count,
                                   uint32_t kinds, oh_mem_handle **pieces_out, size_t *count_out);
onehop_result oh_host_foreign_descriptor(oh_device *device, const oh_mem_handle *piece,
                                         int *fd_out);
onehop_result oh_host_foreign_map(oh_device *device, const oh_mem_handle *piece, int fd,
                                  uint64_t span_bytes, uint64_t offset, oh_mem *span);

/* host_stream.c */
onehop_result oh_host_stream_info(oh_device *device, onehop_stream stream, oh_stream_info *out);
onehop_result oh_host_launch(oh_device *device, const oh_launch *launch);
onehop_result oh_host_copy_on_stream(oh_device *device, void *to, const void *from, size_t bytes,
                                     onehop_stream stream);
onehop_result oh_host_stream_order(oh_device *device, onehop_stream earlier, onehop_stream later);
onehop_result oh_host_stream_idle(oh_device *device, onehop_stream stream, bool *idle_out);
onehop_result oh_host_graph_retain(oh_device *device, onehop_stream stream, void (*gone)(void *),
                                   void *argument);

#endif
