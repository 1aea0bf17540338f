// Where the ranks of NCCL's communicators meet. A collective runs when every rank's stream has come to it; who calls
// another one than the others is named at once.
#pragma once
#include <nccl.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace cuda_emu {

enum class Collective { AllGather, ReduceScatter, AllReduce };

// One collective of all ranks.
struct Round {
  Collective collective;
  std::int64_t count;
  ncclDataType_t type;
  std::string text;
  int first_rank;
  struct Part {
    const void* send = nullptr;
    void* receive = nullptr;
  };
  std::vector<Part> parts;
  int arrived = 0, left = 0;
  bool moved = false;
  std::unique_ptr<char> order = std::make_unique<char>();
};

struct Group {
  int ranks = 0, joined = 0;
  bool failed = false, aborted = false;  // aborted: by any rank; the others' collectives never end
  std::map<std::int64_t, std::shared_ptr<Round>> rounds;
};

class Meetings {
 public:
  int new_id() { return next_id_++; }
  std::shared_ptr<Group> group(const std::string& id, int ranks) {
    std::shared_ptr<Group>& found = groups_[id];
    if (!found) found = std::make_shared<Group>();
    found->ranks = ranks;
    return found;
  }

 private:
  int next_id_ = 0;
  std::map<std::string, std::shared_ptr<Group>> groups_;
};

}  // namespace cuda_emu
