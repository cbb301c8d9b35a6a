/* Golden hashes of processors that the machine does not have, on Linux with an Intel processor that can refuse `cpuid`.

   cc -shared -fPIC -O1 -o build/other_processor.so tests/goldens/other_processor.c
   LD_PRELOAD=$PWD/build/other_processor.so L1_BYTES=32768 python -m tests.goldens.hashes --record --only attention

   Products of jaxlib choose a kernel by what the instruction `cpuid` says while a program runs. This library refuses the
   instruction and answers for it: there is no AVX-512, and with L1_BYTES the first cache has another size. No other
   instruction is changed, so the bits are those of such a processor, but for `rsqrt`, which belongs to the real one. */

#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012
#define AVX512_B (1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31)
#define AVX512_C (1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14)
#define AVX512_AND_AMX_D (1u << 2 | 1u << 3 | 1u << 8 | 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25)
#define AVX_VNNI_AND_AVX512_BF16_A (1u << 4 | 1u << 5)

static unsigned l1_bytes;

static void answers(int on) { syscall(SYS_arch_prctl, ARCH_SET_CPUID, (unsigned long)on); }

static void on_refusal(int number, siginfo_t *info, void *context) {
  greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
  const unsigned char *code = (const unsigned char *)registers[REG_RIP];
  if (code[0] != 0x0f || code[1] != 0xa2) { /* another fault: it comes again, without this handler */
    signal(SIGSEGV, SIG_DFL);
    return;
  }
  unsigned leaf = registers[REG_RAX], part = registers[REG_RCX], a, b, c, d;
  answers(1);
  __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(leaf), "c"(part));
  answers(0);
  if (leaf == 7 && part == 0) b &= ~AVX512_B, c &= ~AVX512_C, d &= ~AVX512_AND_AMX_D;
  if (leaf == 7 && part == 1) a &= ~AVX_VNNI_AND_AVX512_BF16_A;
  if (leaf == 4 && (a & 31) && ((a >> 5) & 7) == 1 && l1_bytes) { /* line, partitions, ways, sets: each less one */
    unsigned line = 64, sets = 64;
    b = (l1_bytes / line / sets - 1) << 22 | (line - 1);
    c = sets - 1;
  }
  registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
  registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void refuse(void) {
  struct sigaction action = {.sa_sigaction = on_refusal, .sa_flags = SA_SIGINFO | SA_NODEFER};
  l1_bytes = getenv("L1_BYTES") ? (unsigned)atol(getenv("L1_BYTES")) : 0;
  sigaction(SIGSEGV, &action, NULL);
  answers(0);
}
