"""The fused steps on the CPU: one C++ source, built once per machine by the system's compiler, called by `ctypes`."""
