/* A library with the functions of NVML that trimesh calls, and GPUs that the environment describes:
 *
 * FAKE_GPUS       their number
 * FAKE_SLICED     index of one that is divided into two slices; -1 for none
 * FAKE_SLOW      1 lets the driver take 0.3 s
 * FAKE_HIDDEN     index of one that this process may not use; -1 for none
 *
 * The UUIDs begin with the parent of the parent of this process: the agent of a host, or the program.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NOT_SUPPORTED 3
#define NO_PERMISSION 4
#define NOT_FOUND 6

typedef struct { unsigned index, slice; } Device; /* slice 0: the whole GPU */

static Device devices[64][3];

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text == NULL || *text == '\0' ? otherwise : atoi(text);
}

static int owner(void) {
    char path[64], line[4096];
    int parent = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", getppid());
    FILE *file = fopen(path, "r");
    if (file == NULL) return 0;
    if (fgets(line, sizeof line, file) != NULL) sscanf(strrchr(line, ')') + 2, "%*c %d", &parent);
    fclose(file);
    return parent;
}

int nvmlInit_v2(void) {
    if (number("FAKE_SLOW", 0)) usleep(300000);
    return number("FAKE_BROKEN", 0) ? 9 : 0;
}
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int status) { return status == 9 ? "Driver Not Loaded" : "Some Error"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = number("FAKE_GPUS", 0);
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **found) {
    if ((int)index == number("FAKE_HIDDEN", -1)) return NO_PERMISSION;
    devices[index][0] = (Device){index, 0};
    *found = &devices[index][0];
    return 0;
}

int nvmlDeviceGetUUID(Device *device, char *text, unsigned size) {
    const char *kind = device->slice ? "MIG" : "GPU";
    snprintf(text, size, "%s-%08x-%04x-%04x", kind, owner(), device->index, device->slice);
    return 0;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **found) {
    char own[96];
    for (int index = 0; index < number("FAKE_GPUS", 0); index++) {
        nvmlDeviceGetHandleByIndex_v2(index, found);
        nvmlDeviceGetUUID(*found, own, sizeof own);
        if (strcmp(own, uuid) == 0) return 0;
    }
    return NOT_FOUND;
}

int nvmlDeviceGetName(Device *device, char *text, unsigned size) {
    (void)device;
    snprintf(text, size, "Fake H1");
    return 0;
}

int nvmlDeviceGetMemoryInfo(Device *device, unsigned long long *memory) {
    unsigned long long total = (device->slice ? 40ULL : 80ULL) << 30;
    memory[0] = total;
    memory[1] = total - (1ULL << 30);
    memory[2] = 1ULL << 30;
    return 0;
}

int nvmlDeviceGetUtilizationRates(Device *device, unsigned *rates) {
    rates[0] = 10 + device->index;
    rates[1] = 5;
    return 0;
}

int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned *found) {
    *found = 50 + device->index + sensor;
    return 0;
}

struct process { unsigned pid; unsigned long long memory; unsigned instances[2]; };

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, struct process *found) {
    (void)device;
    found[0] = (struct process){getpid(), 7ULL << 20, {~0u, ~0u}};
    found[1] = (struct process){1, ~0ULL, {~0u, ~0u}};
    *count = 2;
    return 0;
}

struct pci { char legacy[16]; unsigned parts[3], ids[2]; char bus_id[32]; };

int nvmlDeviceGetPciInfo_v3(Device *device, struct pci *found) {
    memset(found, 0, sizeof *found);
    snprintf(found->bus_id, sizeof found->bus_id, "00000000:%02X:00.0", 0xE0 + device->index);
    return 0;
}

int nvmlDeviceGetMigMode(Device *device, unsigned *now, unsigned *pending) {
    if (number("FAKE_SLICED", -1) < 0) return NOT_SUPPORTED;
    *now = *pending = (int)device->index == number("FAKE_SLICED", -1);
    return 0;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *count) {
    (void)device;
    *count = 3;
    return 0;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned number, Device **found) {
    if (number == 1) return NOT_FOUND; /* numbers have gaps */
    devices[device->index][1 + number / 2] = (Device){device->index, 1 + number / 2};
    *found = &devices[device->index][1 + number / 2];
    return 0;
}
