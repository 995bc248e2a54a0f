// Stands for NVRTC 11.8: a library with all the functions that qkv looks for, of which only the version is asked.
int nvrtcVersion(int* major, int* minor) {
  *major = 11;
  *minor = 8;
  return 0;
}
int nvrtcGetErrorString(void) { return 1; }
int nvrtcCreateProgram(void) { return 1; }
int nvrtcDestroyProgram(void) { return 1; }
int nvrtcCompileProgram(void) { return 1; }
int nvrtcGetProgramLogSize(void) { return 1; }
int nvrtcGetProgramLog(void) { return 1; }
int nvrtcGetCUBINSize(void) { return 1; }
int nvrtcGetCUBIN(void) { return 1; }
