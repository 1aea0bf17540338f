// All of Regather for a program of one's own: the command line (train, check, help, ...) for the models that it adds.
//
//   int main(int argc, char** argv) {
//     regather::ModelRegistry models = regather::built_in_models();
//     models.push_back({.name = "own", .make = own::make_own});
//     return regather::main(argc, argv, models);
//   }
//
// A configuration then says `model: {type: own}`, and own::make_own receives the section as a ModelConfig. The program
// runs alone, or as every rank of mpirun or srun. To train without a command line or YAML, see launcher/trainer.h.
#pragma once
#include "model/registry.h"

namespace regather {

// The exit code. Never throws: errors are lines on stderr.
int main(int argc, char** argv, const ModelRegistry& models = built_in_models());

}  // namespace regather
