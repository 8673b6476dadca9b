"""A device that computes nothing: real CuPy, and NVIDIA's real compiler, without a GPU.

    from null_device import device  # replaces the driver under CuPy: before anything imports CuPy
    with device.counting() as seen:
        step()
    seen.launches["adamw"], seen.waits, seen.bytes_of("H2D")

`device.c` stands in for the CUDA runtime and driver. All of CuPy runs but the kernels, so that it
shows what raises, what is launched, copied, allocated and waited for; values it has none. A process
that imports `device` is changed for ever: tests start one of its own (`cases`), which is also

    python tests/null_device step --layers 12 --width 768 --dtype bfloat16 --with cublaslt,cudnn
    python tests/null_device budgets --update
"""
