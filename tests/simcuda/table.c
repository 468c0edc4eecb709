/* table.c: cuGetProcAddress: every symbol by its plain name, under the version that brought its signature. */
#include <string.h>

#include "sim.h"

#define LOCAL __attribute__((visibility("hidden")))
extern const struct sim_symbol __start_sim_symbols[] LOCAL, __stop_sim_symbols[] LOCAL;

CALL_V(GetProcAddress, _v2, 12000, const char *name, void **out, int version, uint64_t flags, int *status) {
    (void)flags;
    zcu_result r = sim_fail("cuGetProcAddress");
    if (r) return r;
    int found = ZCU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    *out = NULL;
    for (const struct sim_symbol *s = __start_sim_symbols; s < __stop_sim_symbols; s++) {
        if (strcmp(s->name, name) || sim_hidden(name)) continue;
        found = version >= s->version ? ZCU_GET_PROC_ADDRESS_SUCCESS : ZCU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
        if (!found) *out = s->function;
        break;
    }
    if (status) *status = found;
    return found && !status ? ZCU_ERROR_NOT_FOUND : ZCU_SUCCESS;
}
