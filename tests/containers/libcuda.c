/* Stands for a library of the driver's. Needs no other one, so that every loader can load it. */
#ifndef VERSION
#error "VERSION is not defined: see tests/containers/build"
#endif

int cuInit(unsigned int flags);
const char *stand_in_version(void);

int cuInit(unsigned int flags)
{
	return flags ? 1 /* CUDA_ERROR_INVALID_VALUE */ : 0;
}

const char *stand_in_version(void)
{
	return VERSION;
}
