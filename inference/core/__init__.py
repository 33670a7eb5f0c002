"""A prediction for an idle device."""
