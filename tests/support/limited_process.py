"""Runs a module under a limit on file sizes, which looks like a full disk to it."""

LIMITED = """
import resource, runpy, signal, sys
signal.signal(signal.SIGXFSZ, getattr(signal, sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
sys.argv = sys.argv[3:]
runpy.run_module(sys.argv[0], run_name="__main__")
"""
