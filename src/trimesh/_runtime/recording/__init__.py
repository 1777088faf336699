"""What a process keeps of what happens, in a file that outlives it; and where such files are."""

from trimesh._runtime.recording.folder import RunFolder, files_of, is_alive, is_running, read_file, run_folders

__all__ = ["RunFolder", "files_of", "is_alive", "is_running", "read_file", "run_folders"]
