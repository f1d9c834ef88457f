def cubin(capability):
    raise OSError("no NVRTC")
