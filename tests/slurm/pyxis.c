/*
 * Stands in for NVIDIA's Pyxis on the cluster of tests/slurm/cluster: its options are accepted by srun and sbatch as
 * Pyxis registers them, and what a task was given it finds in MHAR_TEST_<OPTION>, in place of a container.
 */
#include <string.h>

#include <slurm/spank.h>

SPANK_PLUGIN(pyxis, 1)

static int given(int option, const char *value, int remote);

static struct {
	struct spank_option option;
	const char *variable;
	char *value;
} options[] = {
	{{"container-image", "IMAGE", "image of the container", 1, 0, given}, "MHAR_TEST_CONTAINER_IMAGE", NULL},
	{{"container-mounts", "SRC:DST[,...]", "mounts of the container", 1, 1, given}, "MHAR_TEST_CONTAINER_MOUNTS", NULL},
	{{"container-workdir", "PATH", "working directory", 1, 2, given}, "MHAR_TEST_CONTAINER_WORKDIR", NULL},
	{{"container-name", "NAME", "name of the container", 1, 3, given}, "MHAR_TEST_CONTAINER_NAME", NULL},
	{{"container-env", "NAME[,...]", "variables that win over the image's", 1, 4, given}, "MHAR_TEST_CONTAINER_ENV", NULL},
};
enum { COUNT = sizeof options / sizeof *options };

static int given(int option, const char *value, int remote)
{
	/* What begins with neither is a name in a registry, and there is none here. */
	if (option == 0 && strspn(value, "./") == 0 && strstr(value, ".sqsh") != NULL) {
		slurm_error("pyxis: docker://%s cannot be imported", value);
		return ESPANK_ERROR;
	}
	options[option].value = strdup(value);
	return ESPANK_SUCCESS;
}

int slurm_spank_init(spank_t spank, int argc, char *argv[])
{
	for (int i = 0; i < COUNT; i++)
		if (spank_option_register(spank, &options[i].option) != ESPANK_SUCCESS)
			return ESPANK_ERROR;
	return ESPANK_SUCCESS;
}

int slurm_spank_task_init(spank_t spank, int argc, char *argv[])
{
	for (int i = 0; i < COUNT; i++)
		if (options[i].value && spank_setenv(spank, options[i].variable, options[i].value, 1) != ESPANK_SUCCESS)
			return ESPANK_ERROR;
	return ESPANK_SUCCESS;
}
