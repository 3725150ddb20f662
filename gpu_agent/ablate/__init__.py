"""What fewer bits for K and V cost a model, measured on the user's own text: `kvstore ablate`."""
