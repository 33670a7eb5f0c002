"""The estimators that come with Hase. A file here that defines an `Estimator` is found without any other change."""
