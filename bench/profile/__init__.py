"""Where the processor time of a workload goes, by part; `python -m bench.profile` is the way in.

What is measured is split twice. The kernel's clocks say what a thread has computed, in user mode and in the kernel,
while it is not sampled (`clocks`). Then py-spy samples the same threads, native code included, and the samples say how
that time is divided (`sampler`): each goes to one part by its innermost frame that names one (`parts`). So the sum of
the parts is the processor time that was measured without the sampler, and only the shares are statistics.
"""
