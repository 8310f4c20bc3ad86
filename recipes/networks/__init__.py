"""The networks of the recipes, their arithmetic, and the peak arithmetic of devices."""
