// A plugin of qemu (7 and later) that counts how often each translated block of instructions runs, and writes
// "address instructions count" lines into the file that the variable COUNTS names.
//
// Debian's qemu-user has no qemu-plugin.h, so what is used of it is declared here.
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef uint64_t Id;
struct qemu_plugin_tb;
struct qemu_plugin_insn;

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

void qemu_plugin_register_vcpu_tb_trans_cb(Id, void (*)(Id, struct qemu_plugin_tb*));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb*, int operation, void* to, uint64_t by);
void qemu_plugin_register_atexit_cb(Id, void (*)(Id, void*), void*);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb*);
struct qemu_plugin_insn* qemu_plugin_tb_get_insn(const struct qemu_plugin_tb*, size_t);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn*);

enum { kAdd = 0 };

typedef struct Block {
  uint64_t count, address, instructions;
  struct Block* next;
} Block;

static Block* blocks;

static void translated(Id id, struct qemu_plugin_tb* tb) {
  (void)id;
  Block* block = calloc(1, sizeof(Block));
  block->instructions = qemu_plugin_tb_n_insns(tb);
  block->address = qemu_plugin_insn_vaddr(qemu_plugin_tb_get_insn(tb, 0));
  block->next = blocks;
  blocks = block;
  qemu_plugin_register_vcpu_tb_exec_inline(tb, kAdd, &block->count, 1);
}

static void finished(Id id, void* unused) {
  (void)id, (void)unused;
  FILE* file = fopen(getenv("COUNTS"), "w");
  for (const Block* b = blocks; b != NULL; b = b->next)
    if (b->count > 0)
      fprintf(file, "%" PRIx64 " %" PRIu64 " %" PRIu64 "\n", b->address, b->instructions, b->count);
  fclose(file);
}

__attribute__((visibility("default"))) int qemu_plugin_install(Id id, const void* info, int argc, char** argv) {
  (void)info, (void)argc, (void)argv;
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  qemu_plugin_register_atexit_cb(id, finished, NULL);
  return 0;
}
