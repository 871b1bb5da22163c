"""`method="portable"`: pure JAX on any platform, without a Domain and without the extension."""
